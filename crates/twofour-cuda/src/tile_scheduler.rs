//! How the tiles of large GEMMs are assigned to CTAs.

/// How the tiles of a GEMM with more tiles than the device has SMs are assigned to CTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TileScheduler {
    /// A persistent grid: as many clusters as the device holds, each of which computes every n-th tile, and whose
    /// epilogue overlaps the next tile's first loads. The fastest on a device of its own.
    #[default]
    Persistent,
    /// A cluster for each tile, started by the hardware as SMs become free. For a device where other kernels hold some
    /// of the SMs for long, such as NCCL's during a backward pass: clusters of a persistent grid that find no SM wait
    /// for a whole share of another one, which can double the GEMM's time.
    Hardware,
}
