//! Slices and data types that a layer refuses.

use half::{bf16, f16};
use twofour_cuda::{
    DataType, Error,
    layer::{self, DeviceBuffer, InputGradient, SparseLinear, SparseLinearSettings},
};

use crate::{cuda::Cuda, dense::numbers, support::bench};

#[test]
fn slices_that_do_not_fit_are_refused_before_anything_is_launched() {
    let Some(bench) = bench() else { return };
    let engine = Cuda::<bf16>::new(&bench.device);
    let (out, inputs, tokens) = (64, 128, 8);
    let master = engine.up(&numbers::<f32>(out * inputs, 1));
    let settings = SparseLinearSettings { input_gradient: InputGradient::Automatic, ..Default::default() };
    let mut layer =
        SparseLinear::new(&engine.context, master.as_slice(), (out, inputs), DataType::BF16, settings).unwrap();
    let short = engine.up(&numbers::<f32>(out * inputs - 1, 1));
    let halves = engine.up(&numbers::<f16>(tokens * inputs, 1));
    let x = engine.up(&numbers::<bf16>(tokens * inputs, 1));
    let mut y = engine.zeros(tokens * out);
    assert!(matches!(
        layer.remask(short.as_slice()),
        Err(Error::Length { what: "the master weight", expected: 8192, found: 8191 })
    ));
    let mut forward = |x: &DeviceBuffer, tokens| {
        layer.forward(x.as_slice(), tokens, layer::Forward::default(), y.as_slice_mut()).unwrap_err()
    };
    assert!(matches!(
        forward(&halves, tokens),
        Error::SliceType { what: "the input", expected: DataType::BF16, found: DataType::F16 }
    ));
    assert!(matches!(forward(&x, tokens - 1), Error::Length { what: "the input", .. }));
    assert!(matches!(forward(&x, usize::MAX), Error::TooLarge { .. }));
    let error =
        SparseLinear::new(&engine.context, master.as_slice(), (out, inputs), DataType::F32, settings).unwrap_err();
    assert!(matches!(error, Error::DataType { dtype: DataType::F32, .. }), "{error}");
}
