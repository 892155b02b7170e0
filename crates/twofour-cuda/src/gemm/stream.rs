//! Products of few tokens on sm_90a: every byte of the weight is read once, as fast as memory gives it.

use serde::{Deserialize, Serialize};

use crate::{
    Device, Element, Result, Stream,
    device::{Kernel, Launch},
    gemm::{
        Epilogue, Operands, Problem, RawOutput,
        sm90::{SHARED_BYTES, shared_bytes_of_each},
    },
    source::Source,
    tensor_map::{Swizzle, TensorMap},
};

/// What a block of the kernel does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// Rows of W: 64, 128, 224 or 256.
    pub features: u32,
    /// Rows of X that there is room for: 8, 16, 32 or 64.
    pub tokens: u32,
    /// Blocks that share the rows of W and sum over a part of the columns each: 1 to 8.
    pub split: u32,
}

/// Features that there are kernels for: metadata of 224 of 8 bits is wider than one copy takes.
fn features(element: Element) -> &'static [u32] {
    if element.bytes() == 1 { &[64, 128] } else { &[64, 128, 224, 256] }
}

/// Tokens that there are kernels for.
const TOKENS: [u32; 4] = [8, 16, 32, 64];

/// Bytes of W's rows in a step.
const ROW: u32 = 128;

/// Elements of the reduction in a step.
fn k_step(element: Element) -> u32 {
    2 * ROW / element.bytes() as u32
}

impl Shape {
    /// Those for a problem: none where there are too many tokens. Every block has a step at least.
    pub fn all(problem: Problem) -> Vec<Shape> {
        let Problem { element, reduction, .. } = problem;
        let Some(tokens) = TOKENS.into_iter().find(|most| problem.tokens <= *most as usize) else { return Vec::new() };
        let steps = reduction.div_ceil(k_step(element) as usize) as u32;
        let of = |features: &u32| {
            (1..=steps.min(8)).map(|split| Shape { features: *features, tokens, split }).collect::<Vec<_>>()
        };
        features(element).iter().flat_map(of).collect()
    }

    /// The one that spreads the work best over the device.
    pub(super) fn best(problem: Problem, multiprocessors: u32) -> Option<Shape> {
        // As few blocks to a row of W as occupy most of the device, and as few readers of X.
        let blocks = |shape: &Shape| problem.features.div_ceil(shape.features as usize) as u32 * shape.split;
        let all = Shape::all(problem);
        let enough = all.iter().filter(|shape| blocks(shape) * 10 >= multiprocessors * 7);
        enough.min_by_key(|shape| (shape.split, std::cmp::Reverse(shape.features))).or(all.last()).copied()
    }
}

/// A kernel: for a type, rows of W and rows of X.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// What W and X are made of.
    pub element: Element,
    /// Rows of W.
    pub features: u32,
    /// Rows of X.
    pub tokens: u32,
}

impl Variant {
    /// Every kernel that a problem may ask for.
    pub fn all() -> Vec<Variant> {
        let of = |element, features| TOKENS.map(|tokens| Variant { element, features, tokens });
        let of = |element| features(element).iter().flat_map(move |features| of(element, *features));
        super::TYPES.iter().flat_map(|(element, _)| of(*element)).collect()
    }

    /// Its name.
    pub fn name(&self) -> String {
        format!("{}-{}x{}", self.element, self.features, self.tokens)
    }

    /// Bytes of an atom of metadata.
    fn atom_bytes(&self) -> u32 {
        64 * (k_step(self.element) / 2) / 8
    }

    fn stage_bytes(&self) -> u32 {
        let Variant { features, tokens, .. } = *self;
        features * ROW + 2 * tokens * ROW + features / 16 * 2 * (self.atom_bytes() / 4) + 16
    }

    /// As many as there is room for, beside a second block where both are small, and no more than eight.
    fn stages(&self) -> u32 {
        let blocks = if self.features > 128 || self.tokens == 64 { 1 } else { 2 };
        let room = shared_bytes_of_each(blocks);
        ((room - self.other_bytes()) / self.stage_bytes()).min(8)
    }

    /// Warpgroups that multiply.
    fn groups(&self) -> u32 {
        self.features.div_ceil(64)
    }

    /// To round up the start, for a barrier, and for the sums that a block is sent.
    fn other_bytes(&self) -> u32 {
        1024 + 16 + (self.tokens / 8 * self.groups() * 128 + 8) * 16
    }

    fn shared_bytes(&self) -> u32 {
        self.other_bytes() + self.stages() * self.stage_bytes()
    }

    /// What the source is defined for.
    pub(crate) fn definitions(&self) -> String {
        format!(
            "#define ELEMENT {}\n#define FEATURES {}\n#define TOKENS {}\n#define STAGES {}\n#define SHARED_BYTES_ASKED {}\n",
            self.element.definition(),
            self.features,
            self.tokens,
            self.stages(),
            self.shared_bytes(),
        )
    }
}

/// A product with its kernel and its launch.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    problem: Problem,
    variant: Variant,
    split: u32,
    kernel: Kernel,
    launch: Launch,
}

/// As the kernel has it.
#[repr(C)]
struct Parameters {
    weight: TensorMap,
    x: TensorMap,
    meta: TensorMap,
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    steps: u32,
    split: u32,
}

impl Plan {
    /// Of a problem that is known to kernels, with one of its shapes.
    pub(super) fn new(device: &Device, problem: Problem, shape: Shape) -> Result<Self> {
        let Shape { features, tokens, split } = shape;
        let variant = Variant { element: problem.element, features, tokens };
        let shared = variant.shared_bytes();
        assert!(shared <= SHARED_BYTES, "{} needs {shared} bytes of shared memory", variant.name());
        let kernel = device.kernel(Source::StreamSm90(variant), "stream")?;
        kernel.allow_shared(shared)?;
        let blocks = problem.features.div_ceil(features as usize) as u32 * split;
        let launch = Launch { grid: (blocks, 1), block: variant.groups() * 128 + 32, shared, cluster: split };
        Ok(Self { problem, variant, split, kernel, launch })
    }

    pub(super) fn kernel(&self) -> String {
        format!("{}s{}", self.variant.name(), self.split)
    }

    /// # Safety
    /// That of [`super::Gemm::run`].
    pub(super) unsafe fn run(&self, stream: Stream, operands: Operands, epilogue: Epilogue) -> Result<()> {
        let Problem { element, output, features, tokens, reduction, .. } = self.problem;
        let Variant { features: tile_features, tokens: tile_tokens, .. } = self.variant;
        let (bytes, step) = (element.bytes(), k_step(element));
        let atom = self.variant.atom_bytes();
        // Metadata of half a step after the other, each for all features; in units of eight bytes, for a tile is 256 of them wide at most.
        let meta_rows = reduction.div_ceil(step as usize / 2);
        let meta_cols = features / 64 * atom as usize / 8;
        let parameters = Parameters {
            weight: TensorMap::new(
                operands.weight.values,
                bytes,
                (features, reduction / 2),
                (tile_features, step / 2),
                Swizzle::Bytes128,
            )?,
            x: TensorMap::new(operands.x, bytes, (tokens, reduction), (tile_tokens, step / 2), Swizzle::Bytes128)?,
            meta: TensorMap::new(
                operands.weight.meta,
                8,
                (meta_rows, meta_cols),
                (2, tile_features / 16 * (atom / 32)),
                Swizzle::None,
            )?,
            to: RawOutput::new((features, tokens), self.problem.order, operands.out, epilogue),
            output: output as u32,
            features: features as u32,
            tokens: tokens as u32,
            steps: reduction.div_ceil(step as usize) as u32,
            split: self.split,
        };
        // SAFETY: the caller's; the structure is the kernel's.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }
}
