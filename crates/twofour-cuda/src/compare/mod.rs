//! Comparing GEMM engines by measurement: this crate's kernels, cuSPARSELt and cuBLASLt, interleaved in shuffled order,
//! with random data and a cold L2.
//!
//! Layers do not use it: they choose kernels by a model ([`crate::raw::gemm::GemmMethod::best`]). It is for `twofour
//! advise`, for benchmarks, and for programs that want the fastest engine of a device. A choice is measured once
//! per device, library version and problem, and cached on disk; it can be printed with its reasons.
//!
//! ```no_run
//! # fn main() -> Result<(), twofour_cuda::Error> {
//! use twofour_cuda::{Device, DataType, compare::Dispatcher, problem::{GemmProblem, Order, XOrder}};
//! let dispatcher = Dispatcher::open(&Device::open(0)?);
//! let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, 4096, 512, 4096);
//! println!("{}", dispatcher.choose(problem)?);
//! // The weight gradient, accumulated into the output.
//! let gradient = GemmProblem { x: XOrder::ReductionFirst, order: Order::FeaturesFirst, accumulate: true, ..problem };
//! println!("{}", dispatcher.choose(gradient)?);
//! # Ok(()) }
//! ```
//!
//! | task | types |
//! |---|---|
//! | the fastest engine for a problem, cached | [`Dispatcher`], [`MeasuredChoice`], [`Int4Choice`] |
//! | a GEMM by a given engine | [`Engine`], [`Product`], [`Libraries`] |
//! | random operands of a problem | [`Trial`], [`TrialTensors`], [`Int4Trial`] |
//! | device time of launches | [`Timer`], [`Contender`], [`Time`] |

mod choice_file;
pub mod cusparselt;
mod dispatcher;
mod engine;
mod epilogue;
mod int4_choice;
mod int4_trial;
mod measured;
pub mod read;
mod tensors;
mod timer;
mod trial;

pub use dispatcher::{Dispatcher, MeasuredChoice};
pub use engine::{Engine, HEURISTICS, Libraries, Product, Weight};
pub use int4_choice::{Int4Choice, Int4Measured};
pub use int4_trial::Int4Trial;
pub use measured::Measured;
pub use tensors::{RandomInt4, RandomWeight, random};
pub use timer::{Contender, REST, Time, Timer};
pub use trial::{PLANNING, Trial, TrialTensors};
