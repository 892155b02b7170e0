//! On several devices and from several threads at once: everybody gets the same bytes. With one device its threads
//! still meet; without any the test skips.

mod support;

use half::bf16;
use support::{
    Bench, device,
    numbers::{Random, adversarial},
};
use twofour::{Axis, estimate::Estimator};
use twofour_cuda::{
    DataType, Device, Error,
    problem::GemmProblem,
    raw::{
        DenseWeight, Packed,
        compress::{CompressRule, CompressTarget, Compressor},
        gemm::{Epilogue, Gemm, GemmOperands},
        prune::NO_NAN,
    },
};

const FEATURES: usize = 512;
const REDUCTION: usize = 1024;

/// Compresses a weight and multiplies with it, few and many tokens.
fn results(device: Device) -> Vec<Vec<u8>> {
    let bench = Bench::new(device);
    let element = DataType::BF16;
    let weight: Vec<bf16> = adversarial(FEATURES * REDUCTION, 1).into_iter().map(bf16::from_f32).collect();
    let compressor = Compressor::new(&bench.device, element, element).unwrap();
    let (there, wrong) = (bench.up(&weight), bench.up(&[NO_NAN]));
    let values = bench.poisoned(FEATURES * REDUCTION, 0xA5u8);
    let meta = bench.poisoned(FEATURES * REDUCTION / 8, 0xA5u8);
    let packed = Packed { values: bench.at(&values), meta: bench.at(&meta) };
    let to = CompressTarget {
        packed,
        order: Gemm::meta_order_of(element),
        factor: None,
        seed: None,
        wrong: bench.at(&wrong),
    };
    let dense = DenseWeight { data: bench.at(&there), rows: FEATURES, cols: REDUCTION };
    let rule = CompressRule::Estimate(Estimator::Mvue { seed: 9 });
    // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the stream has been waited
    // for.
    unsafe { compressor.run(bench.stream(), dense, Axis::Row, rule, to) }.unwrap();
    let mut all = vec![bench.down(&values), bench.down(&meta)];
    for tokens in [3, 300] {
        let problem = GemmProblem::plain(element, element, FEATURES, tokens, REDUCTION);
        let gemm = Gemm::new(&bench.device, problem).unwrap();
        let mut random = Random(tokens as u64);
        let x: Vec<bf16> = (0..tokens * REDUCTION).map(|_| bf16::from_f32(random.number())).collect();
        let x = bench.up(&x);
        let out = bench.poisoned(tokens * FEATURES * 2, 0xFFu8);
        let operands = GemmOperands { weight: packed, x: bench.at(&x), out: bench.at(&out), workspace: 0 };
        // SAFETY: the weight was compressed above; X and the result are as long as the problem asks for; all live until
        // the stream has been waited for.
        unsafe { gemm.run(bench.stream(), operands, Epilogue::default()) }.unwrap();
        all.push(bench.down(&out));
    }
    all
}

/// With a driver or without one.
#[test]
fn a_device_that_is_not_there_is_told() {
    match Device::open(1000) {
        Err(Error::NoDevice { ordinal: 1000, count }) => assert!(count < 1000),
        Err(error @ Error::NoDriver) => assert!(error.to_string().contains("use the CPU kernels")),
        other => panic!("{other:?}"),
    }
}

/// Other tests of this file allocate little meanwhile.
#[test]
fn the_pool_gives_back_what_was_dropped_and_keeps_what_is_allocated() {
    let Some(bench) = device().map(Bench::new) else { return };
    let kept = bench.up(&[1u8, 2, 3]);
    drop(bench.up(&vec![0u8; 256 << 20]));
    bench.device.release_pooled_memory().unwrap();
    let pool = bench.device.pooled_memory().unwrap();
    assert!(pool.reserved < pool.in_use + (128 << 20), "{pool:?}");
    assert_eq!(bench.down(&kept), [1, 2, 3]);
}

#[test]
fn every_device_and_thread_gets_the_same() {
    let Some(first) = device() else { return };
    let mut devices = vec![first];
    loop {
        match Device::open(devices.len()) {
            Ok(device) => devices.push(device),
            Err(Error::NoDevice { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let architecture = devices[0].architecture();
    devices.retain(|device| device.architecture() == architecture);
    eprintln!("{} device(s)", devices.len());
    let expected = results(devices[0].clone());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .flat_map(|_| devices.iter().cloned())
            .map(|device| scope.spawn(move || (0..4).map(|_| results(device.clone())).collect::<Vec<_>>()))
            .collect();
        for thread in threads {
            assert!(thread.join().unwrap().iter().all(|found| *found == expected));
        }
    });
}
