//! Which instructions this machine has, and which of them the kernels use.

#[cfg(target_arch = "x86_64")]
mod tile_permission;

use std::{fmt, str::FromStr, sync::OnceLock};

use crate::{Error, Result};

/// A set of kernels for one kind of CPU. Each includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Engine {
    /// Portable Rust: the reference.
    Scalar,
    /// AVX2, FMA and F16C (Intel from Haswell, AMD from Zen on).
    Avx2,
    /// AVX-512 with VNNI, VBMI and BF16 (Intel from Sapphire Rapids, AMD from Zen 4 on). bf16 weights meet bf16 activations in `vdpbf16ps`; the engines before
    /// this one widen both to f32.
    Avx512,
    /// AVX-512 and AMX tiles for bf16 and int8 (Intel from Sapphire Rapids on).
    Amx,
}

/// The environment variable that forces an engine: `TWOFOUR_ENGINE=scalar|avx2|avx512|amx`. `avx2` multiplies bf16 in f32 arithmetic, `avx512` by AVX512_BF16.
pub const ENGINE_VARIABLE: &str = "TWOFOUR_ENGINE";

impl Engine {
    const ALL: [Engine; 4] = [Engine::Scalar, Engine::Avx2, Engine::Avx512, Engine::Amx];

    /// The name that [`ENGINE_VARIABLE`] takes.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Scalar => "scalar",
            Engine::Avx2 => "avx2",
            Engine::Avx512 => "avx512",
            Engine::Amx => "amx",
        }
    }

    /// The engines that this machine can run, slowest first.
    pub fn available() -> &'static [Engine] {
        static AVAILABLE: OnceLock<Vec<Engine>> = OnceLock::new();
        AVAILABLE.get_or_init(|| Self::ALL.into_iter().take_while(|engine| engine.is_supported()).collect())
    }

    /// The engine to use: the one that [`ENGINE_VARIABLE`] names, or else the best of this machine. Read once.
    ///
    /// # Errors
    /// [`Error::Engine`] where the variable names no engine, or one that this machine cannot run.
    pub fn best() -> Result<Engine> {
        static FORCED: OnceLock<Option<String>> = OnceLock::new();
        let forced = FORCED.get_or_init(|| std::env::var_os(ENGINE_VARIABLE).map(|v| v.to_string_lossy().into_owned()));
        match forced {
            Some(name) => name.parse::<Engine>()?.expect_available(),
            // Scalar is always there.
            None => Ok(*Self::available().last().unwrap_or(&Engine::Scalar)),
        }
    }

    /// The engine itself, if this machine can run it.
    ///
    /// # Errors
    /// [`Error::Engine`] where it cannot.
    pub fn expect_available(self) -> Result<Engine> {
        if Self::available().contains(&self) {
            Ok(self)
        } else {
            Err(Error::Engine {
                name: self.name().to_owned(),
                reason: "this CPU or operating system does not have its instructions",
                available: names(Self::available()),
            })
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn is_supported(self) -> bool {
        match self {
            Engine::Scalar => true,
            Engine::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            Engine::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512vbmi2")
                    && is_x86_feature_detected!("avx512bf16")
            }
            Engine::Amx => tile_permission::granted(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_supported(self) -> bool {
        self == Engine::Scalar
    }
}

/// An engine that this machine can run, with the proof. An [`Engine`] is a name, which anybody can write down.
#[derive(Debug, Clone, Copy)]
pub(super) enum Cpu {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2(HasAvx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(HasAvx512),
    #[cfg(target_arch = "x86_64")]
    Amx(HasAmx),
}

/// Proof that this CPU has AVX2, FMA and F16C: made by [`Cpu::detect`] alone.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(super) struct HasAvx2(());

/// Proof that this CPU has the AVX-512 of [`Engine::Avx512`], with VNNI, VBMI and AVX512_BF16: made by [`Cpu::detect`] alone.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(super) struct HasAvx512(());

/// Proof that this CPU has AMX tiles for bf16 and int8, that this process may use them, and that the CPU has AVX-512: made by
/// [`Cpu::detect`] alone.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(super) struct HasAmx(());

#[cfg(target_arch = "x86_64")]
impl HasAmx {
    /// [`Engine::Amx`] is available only where [`Engine::Avx512`] is.
    pub(super) fn avx512(self) -> HasAvx512 {
        HasAvx512(())
    }
}

impl Cpu {
    /// Looks whether this machine can run an engine.
    ///
    /// # Errors
    /// [`Error::Engine`] where it cannot.
    pub(super) fn detect(engine: Engine) -> Result<Self> {
        Ok(match engine.expect_available()? {
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => Cpu::Avx2(HasAvx2(())),
            #[cfg(target_arch = "x86_64")]
            Engine::Avx512 => Cpu::Avx512(HasAvx512(())),
            #[cfg(target_arch = "x86_64")]
            Engine::Amx => Cpu::Amx(HasAmx(())),
            _ => Cpu::Scalar,
        })
    }

    /// The engine.
    pub(super) fn engine(self) -> Engine {
        match self {
            Cpu::Scalar => Engine::Scalar,
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx2(_) => Engine::Avx2,
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx512(_) => Engine::Avx512,
            #[cfg(target_arch = "x86_64")]
            Cpu::Amx(_) => Engine::Amx,
        }
    }
}

fn names(engines: &[Engine]) -> String {
    engines.iter().map(|e| e.name()).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Engine {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|engine| engine.name() == name).ok_or_else(|| Error::Engine {
            name: name.to_owned(),
            reason: "there is no engine of this name",
            available: names(Self::available()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_list_what_there_is() {
        for engine in Engine::ALL {
            assert_eq!(engine.name().parse::<Engine>().unwrap(), engine);
        }
        let error = "sse9".parse::<Engine>().unwrap_err().to_string();
        assert!(error.contains("`sse9`") && error.contains("scalar"), "{error}");
        assert_eq!(Engine::available()[0], Engine::Scalar);
    }

    #[test]
    fn a_cpu_is_detected_for_every_engine_that_is_available_and_no_other() {
        for engine in Engine::ALL {
            let detected = Cpu::detect(engine).map(Cpu::engine);
            assert_eq!(detected.ok(), Engine::available().contains(&engine).then_some(engine));
        }
    }
}
