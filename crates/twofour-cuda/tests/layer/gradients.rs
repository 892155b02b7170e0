//! The gradients of weight and bias in one call.

use half::bf16;
use twofour_cuda::{
    DataType,
    layer::{Accumulate, SparseLinear, SparseLinearSettings, WeightGradient},
};

use crate::{
    cuda::Cuda,
    dense::{close, numbers, wide},
    support::bench,
};

#[test]
fn both_gradients_at_once_are_those_of_each_by_itself() {
    let Some(bench) = bench() else { return };
    let engine = Cuda::<bf16>::new(&bench.device);
    for (out, inputs, tokens) in [(64, 128, 72), (40, 52, 9), (7, 30, 3)] {
        for weight_gradient in [WeightGradient::Dense, WeightGradient::Masked, WeightGradient::Mvue] {
            let settings = SparseLinearSettings { weight_gradient, ..Default::default() };
            let master = engine.up(&numbers::<f32>(out * inputs, 1));
            let layer =
                SparseLinear::new(&engine.context, master.as_slice(), (out, inputs), DataType::BF16, settings).unwrap();
            let (x, dy) =
                (engine.up(&numbers::<bf16>(tokens * inputs, 2)), engine.up(&numbers::<bf16>(tokens * out, 3)));
            let (mut dw, mut db) = (engine.zeros(out * inputs), engine.zeros(out));
            let (mut dw_apart, mut db_apart) = (engine.zeros(out * inputs), engine.zeros(out));
            for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
                layer.set_seed(5).unwrap();
                let (w, b) = (dw.as_slice_mut(), db.as_slice_mut());
                layer.parameter_gradients(dy.as_slice(), x.as_slice(), tokens, accumulate, w, b).unwrap();
                layer.set_seed(5).unwrap();
                let (w, b) = (dw_apart.as_slice_mut(), db_apart.as_slice_mut());
                layer.weight_gradient(dy.as_slice(), x.as_slice(), tokens, accumulate, w).unwrap();
                layer.bias_gradient(dy.as_slice(), tokens, accumulate, b).unwrap();
                let what = format!("{out}, {inputs}, {tokens}, {weight_gradient:?}, {accumulate:?}");
                let (found, expected) = (dw.to_host::<bf16>().unwrap(), wide(&dw_apart.to_host::<bf16>().unwrap()));
                close(&format!("{what}, weight"), &found, &expected, 1e-2);
                let (found, expected) = (db.to_host::<bf16>().unwrap(), wide(&db_apart.to_host::<bf16>().unwrap()));
                close(&format!("{what}, bias"), &found, &expected, 1e-2);
            }
        }
    }
}
