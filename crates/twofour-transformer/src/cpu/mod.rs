//! The operations of training over f32 slices on the CPU, forward and backward: what
//! [`CpuEngine`](crate::engine::cpu::CpuEngine) runs, for use under other tensors too.
//!
//! Slices are row-major. Loops run in parallel on rayon's current pool, and sums are taken in an order that depends on
//! shapes alone.
//!
//! | module | operation |
//! |---|---|
//! | [`dense`] | the three GEMMs of a linear layer |
//! | [`layer_norm`], [`rms_norm`] | normalization |
//! | [`attention`], [`heads`], [`rope`] | attention, its layouts, rotary position embedding |
//! | [`activation`], [`nonlinearity`] | GELU, SiLU, ReLU; the functions of feed-forward blocks, plain and gated |
//! | [`cross_entropy`], [`distillation`], [`squared_error`] | losses |
//! | [`embedding`] | rows of a table |
//! | [`adamw`] | the optimizer's step |
//! | [`soft_cap`] | bounded scores |
//! | [`softmax`], [`matmul`], [`rows`], [`vector`] | what these are made of |

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod cross_entropy;
pub mod dense;
pub mod distillation;
pub mod embedding;
pub mod float8;
pub mod grid;
pub mod heads;
pub mod keep_of_four;
pub mod layer_norm;
pub mod masking;
pub mod matmul;
pub mod nonlinearity;
pub mod rms_norm;
pub mod rope;
pub mod rows;
pub mod sgd;
pub mod soft_cap;
pub mod softmax;
pub mod squared_error;
pub mod vector;
