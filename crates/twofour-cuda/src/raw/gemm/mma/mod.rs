//! GEMM by `mma.sp`, on every architecture from sm_80 on (8-bit floats from sm_89 on): tiles, kernels and launch parameters.
//!
//! The order of weights and metadata is that of Hopper's `wgmma.sp`, because a lane holds the same word of metadata for both instructions.

use serde::{Deserialize, Serialize};

use super::{
    Epilogue, GemmMethod, GemmOperands, GemmProblem, RawOutput, panels::Panels, supported::elements_name, tile_k,
};
use crate::{
    Architecture, DataType, Device, DevicePtr, Error, Result, Stream,
    device::{Kernel, Launch},
    raw::headers,
    source::{File, Source, Support},
};

/// The tile of the result that a CTA computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MmaTile {
    /// Rows of W: a multiple of 64.
    pub features: u32,
    /// Rows of X: a multiple of 16.
    pub tokens: u32,
    /// Pipeline stages between memory and the tensor cores.
    pub stages: u32,
}

/// Threads of a CTA: four warps.
const THREADS: u32 = 128;

/// Bytes of a step of X's rows.
const STEP_BYTES: u32 = 128;

const TILES: [MmaTile; 4] = [
    MmaTile { features: 128, tokens: 128, stages: 3 },
    MmaTile { features: 128, tokens: 64, stages: 4 },
    MmaTile { features: 64, tokens: 32, stages: 6 },
    MmaTile { features: 64, tokens: 16, stages: 8 },
];

impl MmaTile {
    /// Returns the tiles that kernels have for an element type, whichever 8-bit float type X has.
    pub fn all(element: DataType, architecture: Architecture) -> Vec<MmaTile> {
        let variant = |tile: &MmaTile| MmaKernel { element, x_element: element, tile: *tile };
        TILES.into_iter().filter(|tile| variant(tile).is_for(architecture)).collect()
    }

    /// Returns the tile with the least time according to a model: the number of waves, each as long as the slower of its math and its reads. Returns
    /// any tile where the architecture has no kernel for the elements; planning then returns the error.
    pub fn best(problem: GemmProblem, architecture: Architecture, multiprocessors: u32) -> MmaTile {
        let time = |tile: &MmaTile| {
            let tiles =
                problem.features.div_ceil(tile.features as usize) * problem.tokens.div_ceil(tile.tokens as usize);
            let rounds = tiles.div_ceil(multiprocessors.max(1) as usize) as f64;
            // Cycles of a step: an SM multiplies about 4096 pairs of bytes and reads about 64 bytes in a cycle.
            let products = f64::from(tile.features * tile.tokens * STEP_BYTES) / 4096.0;
            let reads = f64::from(tile.features * STEP_BYTES * 9 / 16 + tile.tokens * STEP_BYTES) / 64.0;
            rounds * products.max(reads)
        };
        let there = MmaTile::all(problem.element, architecture);
        there.into_iter().min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(TILES[0])
    }

    /// Returns the tiles of a problem.
    fn panels(self, problem: GemmProblem) -> Panels {
        Panels::new(problem, (self.features, self.tokens), PANEL_FEATURES)
    }

    /// Returns the launch configuration for a problem.
    pub(super) fn launch_of(self, problem: GemmProblem) -> Launch {
        let variant = MmaKernel { element: problem.element, x_element: problem.x_element, tile: self };
        let blocks = self.panels(problem).tiles();
        Launch { grid: (blocks, 1), block: THREADS, shared: variant.shared_bytes(), cluster: 1 }
    }

    fn name(self) -> String {
        format!("{}x{}x{}", self.features, self.tokens, self.stages)
    }
}

/// A kernel: a tile for data types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MmaKernel {
    /// Data type of W.
    pub element: DataType,
    /// Data type of X.
    pub x_element: DataType,
    /// The tile.
    pub tile: MmaTile,
}

impl MmaKernel {
    /// Returns every kernel that a problem can need.
    pub fn all() -> Vec<MmaKernel> {
        let of = |(element, x_element)| TILES.map(|tile| MmaKernel { element, x_element, tile });
        super::supported::elements().into_iter().flat_map(of).collect()
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> String {
        format!("{}-{}", elements_name(self.element, self.x_element), self.tile.name())
    }

    /// Returns the architectures that have the instruction. Hopper and B200 emulate it for 8-bit floats, which takes registers that only small tiles have left.
    fn support(&self) -> Support {
        match needed(self.element) {
            ADA if self.tile.features > 64 => Support::FromExcept(ADA, &[9, 10]),
            first => Support::From(first),
        }
    }

    /// Returns whether the architecture has the instruction.
    pub fn is_for(&self, architecture: Architecture) -> bool {
        self.support().includes(architecture)
    }

    pub(super) fn source(&self) -> Source {
        let kernel = File::new("gemm/mma/kernel.cu", include_str!("kernel.cu"));
        Source::new(format!("gemm-mma-{}", self.name()), self.support())
            .with([headers::COMMON])
            .define(self.definitions())
            .with([headers::SPARSE_PRODUCT, headers::EPILOGUE, headers::PANELS, kernel])
    }

    /// Returns the bytes of the stages, or of the accumulators that use the same memory after the main loop.
    fn shared_bytes(&self) -> u32 {
        let MmaTile { features, tokens, stages } = self.tile;
        let meta = features * tile_k(self.element).columns() as u32 / 8;
        let stages = stages * (features * STEP_BYTES / 2 + tokens * STEP_BYTES + meta);
        let sums = ((features + 4) * tokens).max((tokens + 4) * features) * 4;
        stages.max(sums)
    }

    /// Returns the source's preprocessor definitions.
    pub(crate) fn definitions(&self) -> String {
        let MmaTile { features, tokens, stages } = self.tile;
        let instruction = instruction(self.element, self.x_element);
        format!("{instruction}#define FEATURES {features}\n#define TOKENS {tokens}\n#define STAGES {stages}\n")
    }
}

/// Returns the preprocessor definitions of kernels with `mma.sp`: the data types of W and of X, the instruction, and the accumulators' type.
pub(super) fn instruction(element: DataType, x_element: DataType) -> String {
    let (instruction, sum, register) = match element {
        DataType::I8 => ("m16n8k64.row.col.s32.s8.s8.s32".to_string(), "int", "r"),
        _ => {
            let depth = 64 / element.bytes();
            (format!("m16n8k{depth}.row.col.f32.{element}.{x_element}.f32"), "float", "f")
        }
    };
    let element = element.definition();
    format!(
        "typedef {sum} Sum;\n#define SUM_REGISTER \"{register}\"\n#define INSTRUCTION \"{instruction}\"\n#define ELEMENT {element}\n"
    )
}

const AMPERE: (u32, u32) = (8, 0);
const ADA: (u32, u32) = (8, 9);

/// Returns the first compute capability with the instruction for an element type.
fn needed(element: DataType) -> (u32, u32) {
    if matches!(element, DataType::E4M3 | DataType::E5M2) { ADA } else { AMPERE }
}

/// A planned GEMM: its kernel and its launch configuration.
#[derive(Debug, Clone)]
pub(super) struct MmaPlan {
    problem: GemmProblem,
    variant: MmaKernel,
    kernel: Kernel,
    launch: Launch,
    panels: Panels,
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
struct MmaParameters {
    values: DevicePtr,
    meta: DevicePtr,
    x: DevicePtr,
    to: RawOutput,
    output: u32,
    rows: u32,
    tokens: u32,
    steps: u32,
    panels: Panels,
    features: u32,
}

/// Features of a panel: see [`super::sm90`].
const PANEL_FEATURES: u32 = 2048;

impl MmaPlan {
    pub(super) fn new(device: &Device, problem: GemmProblem, tile: MmaTile, launch: Launch) -> Result<Self> {
        let variant = MmaKernel { element: problem.element, x_element: problem.x_element, tile };
        let (major, minor) = device.architecture().capability();
        if (major, minor) < needed(problem.element) {
            let needs = if needed(problem.element) == ADA { "8.9 (Ada) or later" } else { "8.0 (Ampere) or later" };
            return Err(Error::Unsupported { operation: "GEMM by mma.sp with these data types", major, minor, needs });
        }
        if !MmaTile::all(problem.element, device.architecture()).contains(&tile) {
            return Err(Error::GemmMethod { method: GemmMethod::Mma(tile), problem });
        }
        let kernel = device.kernel(&variant.source(), "gemm")?;
        kernel.allow_shared()?;
        Ok(Self { problem, variant, kernel, launch, panels: tile.panels(problem) })
    }

    pub(super) fn kernel(&self) -> String {
        format!("mma-{}", self.variant.name())
    }

    /// # Safety
    /// That of [`super::Gemm::run`].
    pub(super) unsafe fn run(&self, stream: Stream, operands: GemmOperands, epilogue: Epilogue) -> Result<()> {
        let GemmProblem { element, output, features, tokens, .. } = self.problem;
        let (rows, columns) = self.problem.padded();
        let parameters = MmaParameters {
            values: operands.weight.values,
            meta: operands.weight.meta,
            x: operands.x,
            to: RawOutput::of(self.problem, operands.out, epilogue),
            output: output as u32,
            rows: rows as u32,
            tokens: tokens as u32,
            steps: (columns / tile_k(element).columns()) as u32,
            panels: self.panels,
            features: features as u32,
        };
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }
}
