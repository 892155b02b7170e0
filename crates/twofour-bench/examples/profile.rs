//! Runs small-batch GEMMs once each, in bf16 and int4, under a profiler: `ncu --kernel-name regex:... profile FEATURES
//! REDUCTION TOKENS [NAME]`, with `cargo build -p twofour-bench --example profile` before. Of all methods those whose
//! kernel's name contains `NAME`; their names are printed in the order of their launches.

use std::error::Error;

use cudarc::driver::DevicePtr as _;
use twofour::int4::Granularity;
use twofour_cuda::{
    DataType, Device, Stream,
    compare::{Engine, Libraries, RandomInt4, Timer, Trial},
    problem::{GemmProblem, Int4Problem, Order},
    raw::gemm::{
        Epilogue, GemmMethod,
        int4::{self, Int4Gemm},
    },
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [features, reduction, tokens, name @ ..] = arguments.as_slice() else {
        return Err("usage: profile FEATURES REDUCTION TOKENS [NAME]".into());
    };
    let (features, reduction, tokens) = (features.parse()?, reduction.parse()?, tokens.parse()?);
    let wanted = |kernel: &str| name.first().is_none_or(|name| kernel.contains(name.as_str()));
    let device = Device::open(0)?;
    let libraries = Libraries::found(&device);
    let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, features, tokens, reduction);
    let trial = Trial::random(&device, &libraries, problem)?;
    let stream = trial.stream();
    let mut timer = Timer::new(&device, stream)?;
    let results = stream.alloc_zeros::<u8>(features * tokens * 2)?;
    let (x, out) = (trial.x().device_ptr(stream).0, results.device_ptr(stream).0);
    for method in GemmMethod::all(problem, device.architecture()) {
        let product = trial.product(Engine::TwoFour(method))?;
        if wanted(&product.kernel()) {
            // SAFETY: the result is as long as the problem requires; all memory lives until the timer has waited.
            let us = timer.time(|| unsafe { product.run(Stream(stream.cu_stream()), x, out) })?;
            println!("bf16 {}: {us:.1} us", product.kernel());
        }
    }
    let random = RandomInt4::new(stream, features, reduction, Granularity::Group)?;
    let weight = random.weight(stream);
    let (element, output, granularity, order) =
        (DataType::BF16, DataType::BF16, Granularity::Group, Order::TokensFirst);
    let problem = Int4Problem { element, output, granularity, features, tokens, reduction, order, epilogue: None };
    for method in int4::Int4Method::all(problem, device.architecture()) {
        let decode = Int4Gemm::with(&device, problem, method)?;
        if wanted(&decode.kernel()) {
            let raw = Stream(stream.cu_stream());
            // SAFETY: the result is as long as the problem requires; all memory lives until the timer has waited.
            let us = timer.time(|| unsafe { decode.run(raw, weight, x, out, Epilogue::default()) })?;
            println!("int4 {}: {us:.1} us", decode.kernel());
        }
    }
    Ok(())
}
