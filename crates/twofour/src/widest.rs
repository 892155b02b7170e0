//! Loops that the compiler turns into vector instructions, compiled for the vectors of the machine.

/// Work that [`widest`] compiles anew. `run` must be marked `#[inline(always)]` and made of functions that are; a
/// closure is such work, but a large one may be compiled as a function of its own, without those vectors.
pub trait Inlined {
    /// What the work returns.
    type Output;

    /// Does the work.
    fn run(self) -> Self::Output;
}

impl<R, F: FnOnce() -> R> Inlined for F {
    type Output = R;

    #[inline(always)]
    fn run(self) -> R {
        self()
    }
}

/// Runs `work` compiled for AVX2 and FMA where this machine has both. Results do not depend on it: no operation of
/// floats is contracted or reordered.
#[inline(always)]
pub fn widest<W: Inlined>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2<W: Inlined>(work: W) -> W::Output {
            work.run()
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            // SAFETY: the two target features that `avx2` is compiled for were detected on the line above.
            #[allow(unsafe_code)]
            return unsafe { avx2(work) };
        }
    }
    work.run()
}
