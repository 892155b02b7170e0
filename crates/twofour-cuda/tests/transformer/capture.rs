//! A graph of several calls.

use half::bf16;
use twofour_cuda::{
    DataType,
    layer::{Accumulate, DeviceBuffer},
    transformer::{
        Embedding, LossFactor, Norm, NormForward, NormKind, cross_entropy, embedding_forward, embedding_gradient,
        norm_forward, prepare,
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
            x: x.as_slice(),
            residual: None,
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
