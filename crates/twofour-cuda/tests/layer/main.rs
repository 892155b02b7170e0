//! On a device: the sparse layer over device memory passes the conformance tests that the one over slices passes, and
//! can be captured in a graph. Without a device the tests skip.

mod capture;
#[path = "../../../twofour/tests/layer/conformance.rs"]
mod conformance;
mod cuda;
mod dense;
mod float8;
mod gradients;
mod packed;
mod refusals;
mod sparse_activation;
#[path = "../support/mod.rs"]
mod support;
mod together;

use cuda::Cuda;
use half::{bf16, f16};
use support::bench;

#[test]
fn the_layer_conforms_in_bf16() {
    let Some(bench) = bench() else { return };
    conformance::run(&Cuda::<bf16>::new(&bench.device));
}

#[test]
fn the_layer_conforms_in_f16() {
    let Some(bench) = bench() else { return };
    conformance::run(&Cuda::<f16>::new(&bench.device));
}
