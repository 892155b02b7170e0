//! Loops that the compiler turns into vector instructions, compiled for the vectors of the machine.

/// Runs `work` compiled for the vectors that every AVX2 machine has, if this machine has them. `work` must be inlined into it.
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
