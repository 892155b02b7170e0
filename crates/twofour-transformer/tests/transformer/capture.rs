//! A graph of several calls.

use half::bf16;
use twofour_cuda::{
    DataType, Error,
    layer::{Accumulate, DeviceBuffer},
};
use twofour_transformer::{
    AttentionShape, ScoreOptions,
    cuda::{
        AdamWSettings, AdamWTensors, AttentionEngine, AttentionGradients, AttentionInputs, ClippedGradients, Embedding,
        GradientClip, LossFactor, Norm, NormForward, NormInput, NormKind, StepSchedule, adamw, attention_backward,
        attention_forward, clip_gradients, cross_entropy, embedding_forward, embedding_gradient, norm_forward, prepare,
        prepare_attention,
    },
};

use crate::{context, reference::numbers, support::captured_on, unwritten, up};

/// Replays give the bits of the calls themselves.
#[test]
fn calls_are_captured_in_a_graph_after_a_run() {
    let Some(context) = context() else { return };
    prepare(&context, DataType::BF16).unwrap();
    let embedding = Embedding { tokens: 96, vocabulary: 40, width: 64, positions: 32 };
    let norm = Norm { kind: NormKind::RootMeanSquare, rows: 96, width: 64, epsilon: 1e-6 };
    let mut ids = DeviceBuffer::from_ids(&context, &[0; 96]).unwrap();
    let (table, positions) = (up(&context, &numbers::<bf16>(40 * 64, 1)), up(&context, &numbers::<bf16>(32 * 64, 2)));
    let gain = up(&context, &numbers::<f32>(64, 3));
    let (mut x, mut y) = (unwritten::<bf16>(&context, 96 * 64), unwritten::<bf16>(&context, 96 * 64));
    let (mut rstd, mut loss) = (unwritten::<f32>(&context, 96), unwritten::<f32>(&context, 1));
    let (mut dtable, mut dpositions) = (unwritten::<f32>(&context, 40 * 64), unwritten::<f32>(&context, 32 * 64));
    let mut status = DeviceBuffer::from_ids(&context, &[0]).unwrap();
    let mut step = |ids: &DeviceBuffer, [x, y, rstd, loss, dtable, dpositions]: [&mut DeviceBuffer; 6]| {
        let tables = (table.as_slice(), Some(positions.as_slice()));
        embedding_forward(&context, embedding, ids.as_slice(), tables, x.as_slice_mut(), status.as_slice_mut())?;
        let forward = NormForward {
            x: NormInput::Tensor(x.as_slice()),
            gain: gain.as_slice(),
            bias: None,
            y: y.as_slice_mut(),
            mean: None,
            rstd: rstd.as_slice_mut(),
        };
        norm_forward(&context, norm, forward)?;
        let (factor, to) = (LossFactor { host: 0.5, device: None }, loss.as_slice_mut());
        let (logits, targets) = (y.as_slice_mut(), ids.as_slice());
        let status_there = status.as_slice_mut();
        cross_entropy(&context, (96, 64), logits, targets, factor, to, Accumulate::Overwrite, status_there)?;
        let to = (dtable.as_slice_mut(), Some(dpositions.as_slice_mut()));
        let (dy, status) = (y.as_slice(), status.as_slice_mut());
        embedding_gradient(&context, embedding, ids.as_slice(), dy, to, Accumulate::Overwrite, status)
    };
    macro_rules! buffers {
        () => {
            [&mut x, &mut y, &mut rstd, &mut loss, &mut dtable, &mut dpositions]
        };
    }
    step(&ids, buffers!()).unwrap();
    context.synchronize().unwrap();
    let graph = captured_on(context.stream(), || step(&ids, buffers!()).unwrap()).unwrap();
    for round in 0..3u32 {
        let drawn: Vec<u32> = (0..96).map(|t| (t * 7 + round * 13) % 40).collect();
        ids.write_ids(&drawn).unwrap();
        graph.launch().unwrap();
        let results = |wide: [&DeviceBuffer; 4], y: &DeviceBuffer| {
            (wide.map(|buffer| buffer.to_host::<f32>().unwrap()), y.to_host::<bf16>().unwrap())
        };
        let replayed = results([&rstd, &loss, &dtable, &dpositions], &y);
        step(&ids, buffers!()).unwrap();
        assert!(replayed == results([&rstd, &loss, &dtable, &dpositions], &y), "round {round}");
    }
}

/// Attention by either engine is captured after it has been prepared, without a run.
#[test]
fn prepared_attention_is_captured_in_a_graph() {
    let Some(context) = context() else { return };
    let shape = AttentionShape {
        batch: 2,
        positions: 70,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        causal: true,
        scores: ScoreOptions::default(),
    };
    let (q_len, k_len) = (shape.query_len().unwrap(), shape.key_len().unwrap());
    let [q, k, v] = [q_len, k_len, k_len].map(|len| up(&context, &numbers::<bf16>(len, len as u64)));
    let dout = up(&context, &numbers::<bf16>(q_len, 9));
    for engine in [AttentionEngine::Batched, AttentionEngine::Fused] {
        match prepare_attention(&context, shape, engine, DataType::BF16) {
            Err(Error::NoLibrary { .. }) => continue,
            prepared => prepared.unwrap(),
        }
        let inputs = AttentionInputs { q: q.as_slice(), k: k.as_slice(), v: v.as_slice() };
        let new = || [q_len, q_len, k_len, k_len].map(|len| unwritten::<bf16>(&context, len));
        let step = |[out, dq, dk, dv]: &mut [DeviceBuffer; 4], lse: &mut DeviceBuffer| {
            attention_forward(&context, shape, engine, inputs, out.as_slice_mut(), lse.as_slice_mut())?;
            let to = AttentionGradients { q: dq.as_slice_mut(), k: dk.as_slice_mut(), v: dv.as_slice_mut() };
            let saved = (out.as_slice(), lse.as_slice(), dout.as_slice());
            attention_backward(&context, shape, engine, inputs, saved, to)
        };
        let (mut replayed, mut direct) = (new(), new());
        let mut lse = unwritten::<f32>(&context, shape.lse_len().unwrap());
        context.synchronize().unwrap();
        let graph = captured_on(context.stream(), || step(&mut replayed, &mut lse).unwrap()).unwrap();
        graph.launch().unwrap();
        step(&mut direct, &mut lse).unwrap();
        let bits = |buffers: [DeviceBuffer; 4]| buffers.map(|buffer| buffer.to_host::<bf16>().unwrap());
        assert!(bits(replayed) == bits(direct), "{engine:?}");
    }
}

/// A graph of an optimizer's step counts, clips and skips at each replay.
#[test]
fn a_graph_of_an_update_counts_clips_and_skips() {
    let Some(context) = context() else { return };
    prepare(&context, DataType::BF16).unwrap();
    let settings = AdamWSettings { learning_rate: f64::NAN, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
    let (rows, cols) = (12, 20);
    let [mut norm, mut scale] = [1, 1].map(|len| unwritten::<f32>(&context, len));
    let mut flag = DeviceBuffer::from_ids(&context, &[0]).unwrap();
    let mut gradient = up(&context, &numbers::<f32>(rows * cols, 1));
    let weight = numbers::<f32>(rows * cols, 2);
    let state = || [weight.clone(), vec![0.0; rows * cols], vec![0.0; rows * cols]].map(|values| up(&context, &values));
    let mut step = |[w, m, v]: &mut [DeviceBuffer; 3], gradient: &DeviceBuffer, schedule: &mut StepSchedule| {
        let to = ClippedGradients {
            norm: norm.as_slice_mut(),
            scale: scale.as_slice_mut(),
            non_finite: flag.as_slice_mut(),
        };
        clip_gradients(&context, &[gradient.as_slice()], GradientClip::to(1.0), to)?;
        schedule.advance(settings, Some(flag.as_slice()))?;
        let tensors = AdamWTensors {
            weight: w.as_slice_mut(),
            copy: None,
            gradient: gradient.as_slice(),
            first: m.as_slice_mut(),
            second: v.as_slice_mut(),
            gradient_scale: Some(scale.as_slice()),
            skip: Some(flag.as_slice()),
        };
        adamw(&context, (rows, cols), tensors, None, schedule, settings)
    };
    let (mut warm, mut replayed, mut direct) = (state(), state(), state());
    let [mut first, mut of_graph, mut by_calls] = [(); 3].map(|()| StepSchedule::new(&context).unwrap());
    step(&mut warm, &gradient, &mut first).unwrap();
    context.synchronize().unwrap();
    let graph = captured_on(context.stream(), || step(&mut replayed, &gradient, &mut of_graph).unwrap()).unwrap();
    let mut expected = 0;
    for (round, bad) in [false, true, false].into_iter().enumerate() {
        let mut values = numbers::<f32>(rows * cols, 5 + round as u64);
        values[7] = if bad { f32::INFINITY } else { values[7] };
        gradient.write(&values).unwrap();
        for schedule in [&mut of_graph, &mut by_calls] {
            schedule.set_learning_rate(1e-2 / (round + 1) as f64).unwrap();
        }
        graph.launch().unwrap();
        step(&mut direct, &gradient, &mut by_calls).unwrap();
        expected += u64::from(!bad);
        assert_eq!((of_graph.steps().unwrap(), by_calls.steps().unwrap()), (expected, expected), "round {round}");
        for (replayed, direct) in replayed.iter().zip(&direct) {
            assert!(replayed.to_host::<f32>().unwrap() == direct.to_host::<f32>().unwrap(), "round {round}");
        }
    }
    assert!(replayed[0].to_host::<f32>().unwrap() != weight, "nothing was updated");
}
