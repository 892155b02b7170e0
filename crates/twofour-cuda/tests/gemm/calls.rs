//! Calls: captured in a graph, and refused.

use half::bf16;
use twofour_cuda::{
    Activation, DataType, Error, TileScheduler,
    problem::{EpilogueKind, GemmProblem},
    raw::{
        Packed,
        gemm::{
            Epilogue, Gemm, GemmMethod, GemmOperands,
            hopper::cluster::{ClusterShape, ClusterTile},
        },
    },
};

use crate::{
    given::{After, Case, Given, planned},
    number::{Number, bytes_of, weight},
    support::{bench, hopper, numbers::Random},
};

/// What a kernel is not compiled for is computed, too, if more slowly.
#[test]
fn an_epilogue_of_another_kind_than_its_plans_is_computed() {
    let Some(bench) = hopper() else { return };
    let [relu, gelu, silu] = [Activation::Relu, Activation::Gelu, Activation::Silu].map(After::BiasThen);
    let mismatches = [
        (gelu, EpilogueKind::Bias),
        (silu, EpilogueKind::Scales),
        (After::Bias, EpilogueKind::Activation),
        (relu, EpilogueKind::ScaledActivation),
        (After::FeatureScales, EpilogueKind::Activation),
        (After::Nothing, EpilogueKind::Bias),
        (After::Nothing, EpilogueKind::Activation),
    ];
    for (after, planned_for) in mismatches {
        for shape in [(320, 33, 1152), (256, 200, 384), (4672, 400, 384)] {
            let mut given = Given::<bf16, bf16>::new(&bench, &Case { after, ..Case::plain(shape, DataType::BF16) });
            given.problem.epilogue = Some(planned_for);
            for method in GemmMethod::all(given.problem, bench.device.architecture()) {
                given.check(Some(method));
            }
        }
    }
}

/// The limit of shared memory is one of a loaded kernel, and each plan of it needs another amount: the layer `[8192,
/// 64]` at eight tokens needs 16 KiB for its output and 147 KiB for its input's gradient.
#[test]
fn plans_that_share_a_kernel_launch_in_any_order() {
    let Some(bench) = bench() else { return };
    let shapes = [(64, 8, 8192), (8192, 8, 64), (384, 1, 8192), (8192, 8, 384), (64, 8, 64)];
    let givens = shapes.map(|shape| Given::<bf16, bf16>::new(&bench, &Case::plain(shape, DataType::BF16)));
    let plans_of = |given: &Given<bf16, bf16>| {
        let methods = GemmMethod::all(given.problem, bench.device.architecture());
        let direct = methods.into_iter().filter(|method| matches!(method, GemmMethod::Direct(_)));
        direct.map(Some).chain([None]).map(|method| planned(&bench, given.problem, method)).collect::<Vec<_>>()
    };
    let plans: Vec<_> = givens.iter().map(|given| (given, plans_of(given))).collect();
    for (given, plans) in &plans {
        plans.iter().for_each(|plan| given.check_plan(plan));
    }
}

/// One or two, few and many tokens, captured once and replayed.
#[test]
fn calls_can_be_captured_in_a_graph() {
    let Some(bench) = hopper() else { return };
    let mut random = Random(11);
    let (features, reduction) = (512, 1408);
    let w = weight::<bf16>(&mut random, features, reduction);
    let (values, meta) = (bench.up(&bytes_of(w.values())), bench.up(&bf16::meta(&w)));
    let packed = Packed { values: bench.at(&values), meta: bench.at(&meta) };
    let streamed = GemmMethod::Cluster(ClusterShape { tile: ClusterTile { features: 224, tokens: 64 }, split: 2 });
    for (tokens, method) in [(2, None), (5, None), (40, None), (40, Some(streamed)), (400, None)] {
        let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, features, tokens, reduction);
        let gemm = planned(&bench, problem, method);
        let x: Vec<bf16> = (0..tokens * reduction).map(|_| bf16::from_f32(random.number())).collect();
        let x = bench.up(&bytes_of(&x));
        let x_place = bench.at(&x);
        bench.expect_replays_alike(&format!("{tokens} tokens, {}", gemm.kernel()), features * tokens * 2, |out| {
            let operands = GemmOperands { weight: packed, x: x_place, out, workspace: 0 };
            // SAFETY: weight, X and result are as long as the problem asks for, and live until the stream has been
            // waited for.
            unsafe { gemm.run(bench.stream(), operands, Epilogue::default()) }.unwrap();
        });
    }
}

/// More tiles than SMs, with and without a cluster: both tile schedulers compute the same bits.
#[test]
fn tile_schedulers_compute_the_same_bits() {
    let Some(bench) = hopper() else { return };
    let mut random = Random(13);
    let (features, reduction, tokens) = (4096, 192, 2500);
    let w = weight::<bf16>(&mut random, features, reduction);
    let (values, meta) = (bench.up(&bytes_of(w.values())), bench.up(&bf16::meta(&w)));
    let packed = Packed { values: bench.at(&values), meta: bench.at(&meta) };
    let x: Vec<bf16> = (0..tokens * reduction).map(|_| bf16::from_f32(random.number())).collect();
    let x = bench.up(&bytes_of(&x));
    let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, features, tokens, reduction);
    let persistent = |method: &GemmMethod| matches!(method, GemmMethod::Tiled(tile) if tile.split.is_none());
    let methods: Vec<_> =
        GemmMethod::all(problem, bench.device.architecture()).into_iter().filter(persistent).collect();
    assert!(methods.len() > 1);
    for method in methods {
        let gemm = planned(&bench, problem, Some(method));
        let [persistent, hardware] = [TileScheduler::Persistent, TileScheduler::Hardware].map(|scheduler| {
            bench.device.set_tile_scheduler(scheduler);
            let out = bench.poisoned(features * tokens, 0x7fffu16);
            let operands = GemmOperands { weight: packed, x: bench.at(&x), out: bench.at(&out), workspace: 0 };
            // SAFETY: weight, X and result are as long as the problem asks for, and live until the stream has been
            // waited for.
            unsafe { gemm.run(bench.stream(), operands, Epilogue::default()) }.unwrap();
            bench.down(&out)
        });
        bench.device.set_tile_scheduler(TileScheduler::Persistent);
        assert!(hardware == persistent, "{}", gemm.kernel());
        assert!(!hardware.contains(&0x7fff), "{}", gemm.kernel());
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let Some(bench) = hopper() else { return };
    let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, 64, 8, 64);
    let plan = |problem| Gemm::new(&bench.device, problem);
    let few = GemmMethod::all(problem, bench.device.architecture())[0];
    assert!(matches!(Gemm::with(&bench.device, GemmProblem { tokens: 9, ..problem }, few), Err(Error::Method { .. })));
    assert!(matches!(plan(GemmProblem { output: DataType::F16, ..problem }), Err(Error::Product { .. })));
    assert!(matches!(plan(GemmProblem { tokens: 0, ..problem }), Err(Error::Dimension { what: "tokens", .. })));
    assert!(matches!(
        plan(GemmProblem { tokens: usize::MAX, ..problem }),
        Err(Error::Dimension { what: "tokens", .. })
    ));
    let mixed = GemmProblem { x_element: DataType::F16, ..problem };
    assert!(matches!(plan(mixed), Err(Error::MixedElements { element: DataType::BF16, x_element: DataType::F16 })));
    let gemm = plan(problem).unwrap();
    let memory = bench.poisoned(1 << 16, 0u32);
    let at = bench.at(&memory);
    let operands = GemmOperands { weight: Packed { values: at, meta: at }, x: at, out: at, workspace: 0 };
    // SAFETY: each of these calls returns an error before it launches anything.
    let run = |operands, epilogue| unsafe { gemm.run(bench.stream(), operands, epilogue) };
    let plain = Epilogue::default();
    assert!(matches!(run(GemmOperands { x: at + 1, ..operands }, plain), Err(Error::Pointer { what: "X", .. })));
    // What would have to be copied has nowhere to go.
    assert_eq!(gemm.workspace_bytes(), 0);
    for unaligned in [GemmOperands { x: at + 2, ..operands }, GemmOperands { x: at + 8, ..operands }] {
        assert!(matches!(run(unaligned, plain), Err(Error::Pointer { what: "workspace", .. })));
    }
    assert!(matches!(run(GemmOperands { out: 0, ..operands }, plain), Err(Error::Pointer { what: "result", .. })));
    assert!(matches!(run(operands, Epilogue { alpha: 2.0, ..plain }), Err(Error::Epilogue)));
}
