//! Which instruction sets this machine has, and which of them the kernels use.

use std::{fmt, str::FromStr, sync::OnceLock};

use super::Engine;
use crate::{Error, Result};

/// The environment variable that forces an engine: `TWOFOUR_ENGINE=scalar|neon|avx2|avx512|amx`. `avx2` multiplies bf16
/// in f32 arithmetic, `avx512` by AVX512_BF16.
pub const ENGINE_VARIABLE: &str = "TWOFOUR_ENGINE";

/// An engine that this machine can run. Unlike an [`Engine`], which is a name, it exists only after detection.
#[derive(Debug, Clone, Copy)]
pub struct Cpu(Engine);

/// The table of instruction sets: for each its name, the configuration that can have it, its
/// [`Vector`](super::vector::Vector) and, where it has tiles, their [`Tile`](super::tile::Tile). From the slowest to
/// the fastest of each architecture.
macro_rules! instruction_sets {
    ($($(#[$doc:meta])* $name:ident = $text:literal: $arch:meta, $vector:ty $(, $tiles:path)?;)*) => {
        /// A set of kernels for one kind of CPU.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Engine { $($(#[$doc])* $name,)* }

        impl Engine {
            pub(super) const ALL: &[Engine] = &[$(Engine::$name),*];

            /// The name that [`ENGINE_VARIABLE`](crate::kernel::ENGINE_VARIABLE) takes.
            pub fn name(self) -> &'static str {
                match self { $(Engine::$name => $text,)* }
            }

            pub(super) fn is_supported(self) -> bool {
                match self {
                    $(
                        #[cfg($arch)]
                        Engine::$name => <$vector>::is_available() $(&& <$tiles>::is_available())?,
                    )*
                    #[allow(unreachable_patterns, reason = "of another architecture")]
                    _ => false,
                }
            }
        }

        impl crate::kernel::engine::Cpu {
            /// Does work that is compiled for the instructions of this engine.
            #[inline(always)]
            pub(super) fn run<W: Work>(self, work: W) -> W::Output {
                match self.engine() {
                    $(
                        // SAFETY: a `Cpu` exists only where detection found the instructions.
                        #[cfg($arch)]
                        Engine::$name => unsafe { Has::<$vector>::new() }.run(work),
                    )*
                    #[allow(unreachable_patterns, reason = "of another architecture, which is never detected")]
                    _ => {
                        // SAFETY: no instructions are needed.
                        unsafe { Has::<scalar::Scalar>::new() }.run(work)
                    }
                }
            }

            /// Where the loops for few and for many tokens cross.
            pub(super) fn many(self) -> Many {
                match self.engine() {
                    $(#[cfg($arch)] Engine::$name => <$vector>::MANY,)*
                    #[allow(unreachable_patterns, reason = "of another architecture")]
                    _ => scalar::Scalar::MANY,
                }
            }

            /// What is added to int8 activations before they are multiplied.
            pub(super) fn offset(self) -> i32 {
                match self.engine() {
                    $(#[cfg($arch)] Engine::$name => <$vector>::OFFSET,)*
                    #[allow(unreachable_patterns, reason = "of another architecture")]
                    _ => scalar::Scalar::OFFSET,
                }
            }

            /// The products of bf16 by bf16, where the engine has instructions for them.
            pub(super) fn pairs(self) -> Option<crate::kernel::format::PairProducts> {
                match self.engine() {
                    $(#[cfg($arch)] Engine::$name => <$vector>::PAIRS,)*
                    #[allow(unreachable_patterns, reason = "of another architecture")]
                    _ => None,
                }
            }

            /// The tiles, where the engine has them.
            pub(super) fn tiles(self) -> Option<crate::kernel::tile::Tiles> {
                match self.engine() {
                    $($(#[cfg($arch)] Engine::$name => Some(crate::kernel::tile::Tiles { bf16: &$tiles, i8: &$tiles }),)?)*
                    _ => None,
                }
            }
        }
    };
}
pub(super) use instruction_sets;

impl Engine {
    /// The engines that this machine can run, slowest first.
    pub fn available() -> &'static [Engine] {
        static AVAILABLE: OnceLock<Vec<Engine>> = OnceLock::new();
        AVAILABLE.get_or_init(|| Self::ALL.iter().copied().filter(|engine| engine.is_supported()).collect())
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
}

impl Cpu {
    /// What every machine can run.
    pub(super) const SCALAR: Self = Cpu(Engine::Scalar);

    /// Looks whether this machine can run an engine.
    ///
    /// # Errors
    /// [`Error::Engine`] where it cannot.
    pub(super) fn detect(engine: Engine) -> Result<Self> {
        engine.expect_available().map(Cpu)
    }

    /// The engine.
    pub(super) fn engine(self) -> Engine {
        self.0
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
        Self::ALL.iter().copied().find(|engine| engine.name() == name).ok_or_else(|| Error::Engine {
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
        for &engine in Engine::ALL {
            assert_eq!(engine.name().parse::<Engine>().unwrap(), engine);
        }
        let error = "sse9".parse::<Engine>().unwrap_err().to_string();
        assert!(error.contains("`sse9`") && error.contains("scalar"), "{error}");
        assert_eq!(Engine::available()[0], Engine::Scalar);
    }

    #[test]
    fn a_cpu_is_detected_for_every_engine_that_is_available_and_no_other() {
        for &engine in Engine::ALL {
            let detected = Cpu::detect(engine).map(Cpu::engine);
            assert_eq!(detected.ok(), Engine::available().contains(&engine).then_some(engine));
        }
    }
}
