//! On a device: the results of GEMMs are those of a reference in f64, within the rounding of their data types, and
//! nothing else is written. Without a device the tests skip.
//!
//! `bench/remote/gpu_run.sh` selects tests for racecheck by parts of their names.

mod accumulation;
mod activation;
mod any_problem;
mod calls;
mod every_kernel;
mod every_method;
mod every_number;
mod given;
mod number;
#[path = "../support/mod.rs"]
mod support;
