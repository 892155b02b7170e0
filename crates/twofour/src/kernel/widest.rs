//! Loops that the compiler turns into vector instructions, compiled for the vectors of the machine.

/// Runs `work` compiled for the vectors that every AVX2 machine has, if this machine has them. `work` must be inlined
/// into it.
#[inline(always)]
pub(crate) fn widest<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: AVX2, which `avx2` is compiled for, was detected on the line above.
            #[allow(unsafe_code)]
            return unsafe { avx2(work) };
        }
    }
    work()
}

/// Work whose `run` is marked `#[inline(always)]`: that of a large closure may be compiled as a function of its own,
/// without those vectors.
pub(crate) trait Inlined {
    /// What it returns.
    type Output;

    /// Does the work.
    fn run(self) -> Self::Output;
}

/// [`widest`] for work that is sure to be inlined.
#[inline(always)]
pub(crate) fn widest_inlined<W: Inlined>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2<W: Inlined>(work: W) -> W::Output {
            work.run()
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: AVX2, which `avx2` is compiled for, was detected on the line above.
            #[allow(unsafe_code)]
            return unsafe { avx2(work) };
        }
    }
    work.run()
}
