//! Results that are added to the output.

use half::bf16;
use twofour_cuda::{DataType, problem::Order, raw::gemm::GemmMethod};

use crate::{
    given::{Case, Given, planned},
    number::result_bytes,
    support::{bench, numbers::result},
};

/// What is added is what would be stored, bit for bit: by tiles that TMA stores and adds, one by one, and by kernels
/// for few tokens.
#[test]
fn accumulation_adds_what_would_be_stored() {
    let Some(bench) = bench() else { return };
    let architecture = bench.device.architecture();
    for (shape, order) in [
        ((256, 264, 192), Order::TokensFirst),
        ((256, 264, 192), Order::FeaturesFirst),
        ((64, 5, 128), Order::TokensFirst),
        ((100, 40, 128), Order::TokensFirst),
    ] {
        for output in [DataType::BF16, DataType::F32] {
            let stored = Given::<bf16, bf16>::new(&bench, &Case { order, ..Case::plain(shape, output) });
            let added =
                Given::<bf16, bf16>::new(&bench, &Case { order, accumulate: true, ..Case::plain(shape, output) });
            let width = output.bytes();
            let number = |bytes: &[u8]| result(bytes, output, 0.0).0;
            let there: Vec<u8> =
                (0..shape.0 * shape.1).flat_map(|i| result_bytes(output, (i % 11) as f64 / 8.0 - 0.5)).collect();
            for method in GemmMethod::likely(added.problem, architecture) {
                let plan = |given: &Given<'_, bf16, bf16>| planned(&bench, given.problem, Some(method));
                let results = stored.run(&plan(&stored), &there, "stored");
                let sums = added.run(&plan(&added), &there, "added");
                let sum = |(a, b): (&[u8], &[u8])| match output {
                    DataType::F32 => f64::from((number(a) + number(b)) as f32),
                    _ => bf16::from_f64(number(a) + number(b)).to_f64(),
                };
                let expected = results.chunks(width).zip(there.chunks(width)).map(sum);
                let found = sums.chunks(width).map(number);
                assert!(expected.eq(found), "{method:?} for {:?}", added.problem);
            }
        }
    }
}
