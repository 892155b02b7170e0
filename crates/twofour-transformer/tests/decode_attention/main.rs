//! On a device: what generating text needs beside the linear layers, against plain f64 references. Without a device the
//! tests skip.

mod attention;
mod dense;
#[path = "../transformer/reference.rs"]
#[allow(dead_code)]
mod reference;
#[path = "../support/mod.rs"]
mod support;
mod tokens;

use half::{bf16, f16};
use twofour::Arithmetic;
use twofour_cuda::layer::{DeviceBuffer, LayerContext};

/// A check for tensors of one type.
trait Check {
    /// Checks type `T`, whose results are within `tolerance`, relative to 1 and the result.
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64);
}

/// Runs a check for every type, on the first device.
fn for_each_type(check: &impl Check) {
    let Some(device) = support::device() else { return };
    let context = LayerContext::new(&device).unwrap();
    check.run::<f32>(&context, 1e-5);
    check.run::<f16>(&context, 4e-3);
    check.run::<bf16>(&context, 3e-2);
}

/// A tensor on the device.
fn up<T: twofour::Element>(context: &LayerContext, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_host(context, values).unwrap()
}
