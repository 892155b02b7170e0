//! Products with a 2:4 weight on tensor cores: `act(alpha · scales · X Wᵀ + bias)`.
//!
//! A weight comes compressed, as [`crate::prune`] leaves it, with metadata in the order that the plan asks for ([`Gemm::meta_order`]). The input
//! gradient is the same product with the compressed transpose; the weight's gradient, `MVUE(dYᵀ) X`, is one whose weight is the compressed gradient of the output,
//! whose tokens are the layer's inputs, and whose reduction is over the layer's tokens.
//!
//! | tensor | shape |
//! |---|---|
//! | W | `[features, reduction]`, compressed |
//! | X | `[tokens, reduction]` or `[reduction, tokens]`, row-major ([`XOrder`]) |
//! | result | `[tokens, features]` or `[features, tokens]`, row-major ([`Order`]) |
//!
//! Weights of four bits have an order and a kernel of their own ([`int4`]).
//!
//! On Hopper products are by `wgmma.sp` ([`sm90`]), those of few tokens by `mma.sp` ([`rings`]) or, for 8-bit floats and the largest weights, by `wgmma.sp`, too
//! ([`stream`]). Elsewhere from sm_80 on they are by `mma.sp` ([`mma`]), and those of one or two tokens everywhere ([`direct`]). A weight is in the same order for all of
//! them.
//!
//! A [`Gemm`] is planned once for a problem. Its calls only launch: they neither allocate nor wait, and may be captured in a graph.

mod cost;
pub mod direct;
pub mod int4;
pub mod mma;
mod panels;
pub mod rings;
pub mod sm90;
pub mod stream;

use serde::{Deserialize, Serialize};
use twofour::layout::sm90::TileK;

use crate::{
    Architecture, Device, DevicePtr, Element, Error, Result, Stream,
    prune::{MetaOrder, Packed, expect_multiple, expect_pointers},
};

/// What is to be multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Problem {
    /// What W and X are made of.
    pub element: Element,
    /// What the result and the bias are made of.
    pub output: Element,
    /// Rows of W.
    pub features: usize,
    /// Rows of X: of a batch `[batch, tokens, reduction]` that lies in one piece, `batch * tokens`.
    pub tokens: usize,
    /// Columns of both.
    pub reduction: usize,
    /// Which of X's axes is contiguous.
    pub x: XOrder,
    /// Which of the result's axes is contiguous.
    pub order: Order,
    /// Whether sums are scaled, biased or activated before they are stored ([`Epilogue`]): a kernel of its own.
    pub epilogue: bool,
}

/// Which of the result's axes is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Order {
    /// `[tokens, features]`, as layers have it.
    TokensFirst,
    /// `[features, tokens]`.
    FeaturesFirst,
}

/// Which of X's axes is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum XOrder {
    /// `[tokens, reduction]`, as layers have it.
    TokensFirst,
    /// `[reduction, tokens]`: for the gradient of a weight, whose reduction is over the tokens of a layer. For f16 and bf16 on Hopper. The reduction may then be any
    /// number; the weight has groups of zeros up to the next multiple of 64 columns, as [`crate::compress`] makes them.
    ReductionFirst,
}

/// A function on every result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Activation {
    /// The value itself.
    #[default]
    None,
    /// `max(x, 0)`; NaN stays NaN.
    Relu,
    /// `x / 2 · (1 + erf(x / √2))`.
    Gelu,
    /// `x / (1 + e⁻ˣ)`.
    Silu,
}

/// What is done to sums before they are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epilogue {
    /// A factor.
    pub alpha: f32,
    /// A factor for each feature, f32.
    pub feature_scales: Option<DevicePtr>,
    /// A factor for each token, f32.
    pub token_scales: Option<DevicePtr>,
    /// A summand for each feature, of the result's type; after the factors.
    pub bias: Option<DevicePtr>,
    /// A function; after the bias.
    pub activation: Activation,
}

impl Default for Epilogue {
    /// The sums themselves.
    fn default() -> Self {
        Self { alpha: 1.0, feature_scales: None, token_scales: None, bias: None, activation: Activation::None }
    }
}

/// Where results go to and what is done to sums before, as kernels have it.
#[repr(C)]
struct RawOutput {
    data: DevicePtr,
    bias: DevicePtr,
    feature_scales: DevicePtr,
    token_scales: DevicePtr,
    stride_feature: u64,
    stride_token: u64,
    alpha: f32,
    activation: u32,
    plain: u32,
}

impl RawOutput {
    fn new((features, tokens): (usize, usize), order: Order, data: DevicePtr, epilogue: Epilogue) -> Self {
        let (stride_feature, stride_token) = match order {
            Order::TokensFirst => (1, features as u64),
            Order::FeaturesFirst => (tokens as u64, 1),
        };
        Self {
            data,
            bias: epilogue.bias.unwrap_or(0),
            feature_scales: epilogue.feature_scales.unwrap_or(0),
            token_scales: epilogue.token_scales.unwrap_or(0),
            stride_feature,
            stride_token,
            alpha: epilogue.alpha,
            activation: match epilogue.activation {
                Activation::None => 0,
                Activation::Relu => 1,
                Activation::Gelu => 2,
                Activation::Silu => 3,
            },
            plain: u32::from(epilogue == Epilogue::default()),
        }
    }
}

/// Where the tensors are.
#[derive(Debug, Clone, Copy)]
pub struct Operands {
    /// W, compressed, with metadata in [`Gemm::meta_order`].
    pub weight: Packed,
    /// X.
    pub x: DevicePtr,
    /// The result.
    pub out: DevicePtr,
}

/// Which results there are of which elements.
const TYPES: &[(Element, &[Element])] = &[
    (Element::F16, &[Element::F16, Element::F32]),
    (Element::BF16, &[Element::BF16, Element::F32]),
    (Element::E4M3, &[Element::BF16, Element::F16, Element::F32]),
    (Element::E5M2, &[Element::BF16, Element::F16, Element::F32]),
    (Element::I8, &[Element::BF16, Element::F16, Element::I32]),
];

impl Problem {
    /// As layers have it: X is `[tokens, reduction]`, the result `[tokens, features]` and the sums themselves.
    pub fn plain(element: Element, output: Element, features: usize, tokens: usize, reduction: usize) -> Self {
        let (x, order) = (XOrder::TokensFirst, Order::TokensFirst);
        Self { element, output, features, tokens, reduction, x, order, epilogue: false }
    }

    /// Whether kernels know the types and the shape.
    fn expect_known(self) -> Result<()> {
        let Problem { element, output, features, tokens, reduction, x, epilogue, .. } = self;
        let known = TYPES.iter().any(|(e, outputs)| *e == element && outputs.contains(&output));
        if !known || epilogue && output == Element::I32 {
            return Err(Error::Product { element, output, epilogue });
        }
        for (what, size) in [("features", features), ("tokens", tokens), ("reduction", reduction)] {
            expect_dimension(what, size, MOST)?;
        }
        expect_multiple("features of the product", features, 64)?;
        match x {
            XOrder::TokensFirst => expect_multiple("reduction of the product", reduction, tile_k(element).columns()),
            XOrder::ReductionFirst if element.bytes() == 2 && !epilogue => {
                expect_multiple("tokens of the product", tokens, 8)
            }
            XOrder::ReductionFirst => Err(Error::XOrder { element, epilogue }),
        }
    }
}

/// An error for what an epilogue points to, where it is not aligned to its elements.
fn expect_epilogue(epilogue: Epilogue, output: Element) -> Result<()> {
    let optional = [
        ("scales of features", epilogue.feature_scales, 4),
        ("scales of tokens", epilogue.token_scales, 4),
        ("bias", epilogue.bias, output.bytes() as u64),
    ];
    for (what, pointer, alignment) in optional {
        if let Some(pointer) = pointer {
            expect_pointers(&[(what, pointer, alignment)])?;
        }
    }
    Ok(())
}

/// The largest dimension that kernels count.
const MOST: usize = (1 << 30) - 1;

/// An error for a dimension that is zero or more than it may be.
fn expect_dimension(what: &'static str, size: usize, most: usize) -> Result<()> {
    if (1..=most).contains(&size) { Ok(()) } else { Err(Error::Dimension { what, size, most }) }
}

/// The step that metadata is ordered for.
fn tile_k(element: Element) -> TileK {
    if element.bytes() == 2 { TileK::K64 } else { TileK::K128 }
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Method {
    /// Tile by tile, for many tokens, by `wgmma.sp`.
    Tiled(sm90::Tile),
    /// All tokens at once, for few, by `wgmma.sp`.
    Streamed(stream::Shape),
    /// All tokens at once, for few, by `mma.sp` and without a cluster.
    Rings(rings::Shape),
    /// All tokens at once, for at most eight, by `mma.sp`.
    Direct(direct::Shape),
    /// Tile by tile, by `mma.sp`: on Hopper, too, but not at its best there.
    Mma(mma::Tile),
}

/// How far from the least time by the model a method may be, and how many there may be, to be worth measuring.
const LIKELY: f64 = 1.5;
const MOST_LIKELY: usize = 24;

impl Method {
    /// Those that compute a problem.
    pub fn all(problem: Problem, architecture: Architecture) -> Vec<Method> {
        let direct = direct::Shape::all(problem, architecture).into_iter().map(Method::Direct);
        if !is_hopper(architecture) {
            if problem.x == XOrder::ReductionFirst {
                return Vec::new();
            }
            let tiles = mma::Tile::all(problem.element, architecture).into_iter().map(Method::Mma);
            return direct.chain(tiles).collect();
        }
        let tiled = sm90::Tile::all(problem).into_iter().map(Method::Tiled);
        if problem.x == XOrder::ReductionFirst {
            return tiled.collect();
        }
        let streamed = stream::Shape::all(problem).into_iter().map(Method::Streamed);
        let rings = rings::Shape::all(problem.element, problem.tokens).into_iter().map(Method::Rings);
        direct.chain(rings).chain(streamed).chain(tiled).collect()
    }

    /// Those of them that may be the fastest by a model of the device's time: what is worth measuring. On Hopper at most 24.
    pub fn likely(problem: Problem, architecture: Architecture) -> Vec<Method> {
        let mut methods = Self::all(problem, architecture);
        if is_hopper(architecture) {
            let mut times: Vec<f64> = methods.iter().map(|method| cost::microseconds(*method, problem)).collect();
            times.sort_by(f64::total_cmp);
            if let Some(least) = times.first() {
                let most = (LIKELY * least).min(times[times.len().min(MOST_LIKELY) - 1]);
                methods.retain(|method| cost::microseconds(*method, problem) <= most);
            }
        }
        methods
    }

    /// The one that takes the least time by a model of the device.
    pub fn best(problem: Problem, architecture: Architecture, multiprocessors: u32) -> Method {
        if is_hopper(architecture) {
            let time = |method: &Method| cost::microseconds(*method, problem);
            let best = Self::all(problem, architecture).into_iter().min_by(|a, b| time(a).total_cmp(&time(b)));
            return best.expect("a persistent tile computes any problem");
        }
        let direct = direct::Shape::best(problem, architecture, multiprocessors).map(Method::Direct);
        direct.unwrap_or_else(|| Method::Mma(mma::Tile::best(problem, architecture, multiprocessors)))
    }
}

/// Whether there is `wgmma.sp`.
fn is_hopper(architecture: Architecture) -> bool {
    architecture.capability() == (9, 0)
}

/// A product that has been planned: its kernel is loaded and its launch is settled.
#[derive(Debug, Clone)]
pub struct Gemm {
    problem: Problem,
    plan: Plan,
}

#[derive(Debug, Clone)]
enum Plan {
    Tiled(sm90::Plan),
    Streamed(stream::Plan),
    Rings(rings::Plan),
    Direct(direct::Plan),
    Mma(mma::Plan),
}

impl Gemm {
    /// Plans with the method that a model of the device's time finds best.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for the device, [`Error::Product`] for a combination of types that no kernel has, [`Error::Multiple`] and
    /// [`Error::Dimension`] for a shape; those of compiling and loading.
    pub fn new(device: &Device, problem: Problem) -> Result<Self> {
        Self::with(device, problem, Method::best(problem, device.architecture(), device.multiprocessors()))
    }

    /// Plans with a method of the caller's choice: one of [`Method::all`], or any of [`mma::Tile::all`].
    ///
    /// # Errors
    /// Those of [`Gemm::new`], and [`Error::Method`].
    pub fn with(device: &Device, problem: Problem, method: Method) -> Result<Self> {
        problem.expect_known()?;
        let architecture = device.architecture();
        if problem.x == XOrder::ReductionFirst && !is_hopper(architecture) {
            let (major, minor) = architecture.capability();
            let operation = "a product with X as [reduction, tokens]";
            return Err(Error::Unsupported { operation, major, minor, needs: "9.0 (Hopper)" });
        }
        let known = match method {
            // What the architecture lacks is an error of its own.
            Method::Mma(_) => problem.x == XOrder::TokensFirst,
            Method::Direct(shape) => direct::Shape::all(problem, architecture).contains(&shape),
            _ if !is_hopper(architecture) => {
                let (major, minor) = architecture.capability();
                let needs = "9.0 (Hopper)";
                return Err(Error::Unsupported { operation: "a product by wgmma.sp", major, minor, needs });
            }
            _ => Method::all(problem, architecture).contains(&method),
        };
        if !known {
            return Err(Error::Method { method, problem });
        }
        let plan = match method {
            Method::Tiled(tile) => Plan::Tiled(sm90::Plan::new(device, problem, tile)?),
            Method::Streamed(shape) => Plan::Streamed(stream::Plan::new(device, problem, shape)?),
            Method::Rings(shape) => Plan::Rings(rings::Plan::new(device, problem, shape)?),
            Method::Direct(shape) => Plan::Direct(direct::Plan::new(device, problem, shape)?),
            Method::Mma(tile) => Plan::Mma(mma::Plan::new(device, problem, tile)?),
        };
        Ok(Self { problem, plan })
    }

    /// Multiplies.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to 16 bytes (scales and bias: to their elements), [`Error::Epilogue`] where one is
    /// asked for that was not planned, [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what the problem reads and writes until the stream has come past this call, and nothing else writes there; the
    /// metadata's codes are six of the sixteen, as compressing makes them; the stream is of the plan's device.
    pub unsafe fn run(&self, stream: Stream, operands: Operands, epilogue: Epilogue) -> Result<()> {
        let Operands { weight, x, out } = operands;
        expect_pointers(&[
            ("values", weight.values, 16),
            ("metadata", weight.meta, 16),
            ("X", x, 16),
            ("result", out, 16),
        ])?;
        let problem = self.problem;
        if !problem.epilogue && epilogue != Epilogue::default() {
            return Err(Error::Epilogue);
        }
        expect_epilogue(epilogue, problem.output)?;
        match &self.plan {
            // SAFETY: the caller's.
            Plan::Tiled(plan) => unsafe { plan.run(stream, operands, epilogue) },
            // SAFETY: as above.
            Plan::Streamed(plan) => unsafe { plan.run(stream, operands, epilogue) },
            // SAFETY: as above.
            Plan::Rings(plan) => unsafe { plan.run(stream, operands, epilogue) },
            // SAFETY: as above.
            Plan::Direct(plan) => unsafe { plan.run(stream, operands, epilogue) },
            // SAFETY: as above.
            Plan::Mma(plan) => unsafe { plan.run(stream, operands, epilogue) },
        }
    }

    /// The problem.
    pub fn problem(&self) -> Problem {
        self.problem
    }

    /// The order that metadata must be in.
    pub fn meta_order(&self) -> MetaOrder {
        Self::meta_order_of(self.problem.element)
    }

    /// The order that metadata of an element type must be in, whatever the method.
    pub fn meta_order_of(element: Element) -> MetaOrder {
        MetaOrder::Sm90(tile_k(element))
    }

    /// The kernel's name, which tells its shape.
    pub fn kernel(&self) -> String {
        match &self.plan {
            Plan::Tiled(plan) => plan.kernel(),
            Plan::Streamed(plan) => plan.kernel(),
            Plan::Rings(plan) => plan.kernel(),
            Plan::Direct(plan) => plan.kernel(),
            Plan::Mma(plan) => plan.kernel(),
        }
    }
}
