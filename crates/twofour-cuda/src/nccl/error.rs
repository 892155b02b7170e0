//! What goes wrong with NCCL.

/// NCCL is missing, or a call of it failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// It was not found.
    #[error(
        "no NCCL, which several GPUs require; searched: {searched}; install it or Python's package nvidia-nccl-cu12 or \
         -cu13, and name its folder in \
         TWOFOUR_NCCL if it is not found"
    )]
    Missing {
        /// The places that were searched.
        searched: String,
    },

    /// A call failed.
    #[error("{action}: NCCL says status {status} ({text}); NCCL_DEBUG=INFO makes it say more")]
    Call {
        /// The failed action.
        action: &'static str,
        /// The library's status code.
        status: i32,
        /// Its explanation.
        text: String,
    },

    /// A sum after another rank had failed.
    #[error("sums over several GPUs were aborted, because one of them failed")]
    Aborted,
}
