//! Dense linear algebra in f32 and f64 that solvers require: GEMM, Cholesky factors, inverses and eigenvectors.

pub(crate) mod eigen;
pub(crate) mod factor;
pub(crate) mod gemm;
