//! On a device: what a transformer's training needs beside the sparse layer, against plain f64 references. Without a
//! device the tests skip.

mod attention;
mod capture;
mod embedding;
mod gated;
mod heads;
mod image;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod pointwise;
mod reference;
#[path = "../support/mod.rs"]
mod support;
mod weighted_rows;

use half::{bf16, f16};
use twofour::Arithmetic;
use twofour_cuda::layer::{DeviceBuffer, LayerContext};

/// A context on the first device, or `None` where there is none.
fn context() -> Option<LayerContext> {
    support::device().map(|device| LayerContext::new(&device).unwrap())
}

/// A check for activations of one type.
trait Check {
    /// Checks activations of type `T`, whose results are within `tolerance`, relative to 1 and the result.
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64);
}

/// Runs a check for every type of activations.
fn for_each_type(check: &impl Check) {
    let Some(context) = context() else { return };
    check.run::<f32>(&context, 1e-5);
    check.run::<f16>(&context, 4e-3);
    check.run::<bf16>(&context, 3e-2);
}

/// A tensor on the device.
fn up<T: twofour::Element>(context: &LayerContext, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_host(context, values).unwrap()
}

/// A tensor on the device whose elements are NaN: all of them are to be overwritten.
fn unwritten<T: Arithmetic>(context: &LayerContext, len: usize) -> DeviceBuffer {
    up(context, &vec![T::from_f32(f32::NAN); len])
}
