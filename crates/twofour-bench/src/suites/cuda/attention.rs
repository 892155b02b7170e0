//! The suite `attention`: attention and its gradients, by our kernels and by batched GEMMs.

use std::cell::RefCell;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use twofour::Element;
use twofour_cli::{
    measure::random::Random,
    present::{table::Table, units},
};
use twofour_cuda::{
    DataType, Device,
    compare::{Contender, Time, Timer},
    layer::{DeviceBuffer, LayerContext},
};
use twofour_transformer::cuda::{
    AttentionEngine, AttentionGradients, AttentionInputs, attention_backward, attention_forward, prepare_attention,
};
use twofour_transformer::{AttentionShape, ScoreOptions};

use super::suite::{Bench, Suite};

/// One contender's time for one shape.
#[derive(Debug, Serialize)]
pub(crate) struct AttentionRow {
    /// Data type of queries, keys and values.
    dtype: &'static str,
    /// Sequences, positions, heads, elements of a head.
    shape: [usize; 4],
    /// Whether a position attends to itself and earlier positions only.
    causal: bool,
    /// The contender.
    contender: &'static str,
    /// The pass, or both.
    part: &'static str,
    /// Median, microseconds.
    us: f64,
    /// The minimum, microseconds.
    min_us: f64,
    /// The maximum, microseconds.
    max_us: f64,
    /// 10^12 operations a second: four for each score and element of a head forward, ten backward; half of them where
    /// the mask is causal.
    tflops: f64,
}

const PLAIN: ScoreOptions = ScoreOptions { window: None, scale: None, soft_cap: None };

const fn shape(batch: usize, positions: usize, heads: usize, head_dim: usize, causal: bool) -> AttentionShape {
    AttentionShape { batch, positions, heads, kv_heads: heads, head_dim, causal, scores: PLAIN }
}

/// ViT-L at two resolutions, GPT-2 (774 M), GPT-2 small, and heads of 128 and 32 elements; then lengths between them.
const SHAPES: [AttentionShape; 14] = [
    shape(32, 257, 16, 64, false),
    shape(8, 1626, 16, 64, false),
    shape(8, 1024, 20, 64, true),
    shape(32, 256, 12, 64, true),
    shape(2, 4096, 32, 128, true),
    shape(16, 512, 8, 32, true),
    shape(64, 64, 12, 64, false),
    shape(64, 128, 12, 64, false),
    shape(16, 577, 12, 64, false),
    shape(64, 128, 12, 64, true),
    shape(20, 384, 12, 64, true),
    shape(16, 512, 12, 64, true),
    shape(16, 256, 16, 128, true),
    shape(8, 512, 16, 128, true),
];

/// Measure attention forward and backward in bf16
///
/// By kernels that keep scores in registers, and by batched GEMMs with a softmax.
#[derive(Debug, Args)]
#[command(after_help = "Example: twofour-bench cuda attention -o attention.json")]
pub(crate) struct Attention {}

impl Suite for Attention {
    const NAME: &'static str = "attention";
    const NOTE: &'static str =
        "Medians. TFLOP/s: of the products over all scores, half of them where the mask is causal.";
    type Row = AttentionRow;

    fn measure(&self, bench: &mut Bench<'_>) -> Result<Vec<AttentionRow>> {
        let mut rows = Vec::new();
        for (done, shape) in SHAPES.into_iter().enumerate() {
            let what = format!("attention, {} x {} tokens", shape.batch, shape.positions);
            bench.begin(&what, done, SHAPES.len());
            rows.extend(attention(bench.device, shape, bench.rounds)?);
        }
        Ok(rows)
    }

    fn table(rows: &[AttentionRow]) -> Table {
        let mut table = Table::of(["attention", "dtype", "baseline", "pass"], ["time", "TFLOP/s"]);
        for row in rows {
            let [batch, positions, heads, head_dim] = row.shape;
            let mask = if row.causal { "causal" } else { "full" };
            table.row([
                format!("{batch} x {positions} tokens, {heads} heads of {head_dim}, {mask}"),
                row.dtype.into(),
                row.contender.into(),
                row.part.into(),
                units::microseconds(row.us),
                format!("{:.0}", row.tflops),
            ]);
        }
        table
    }

    fn told(&self) -> String {
        String::new()
    }
}

const ENGINES: [(&str, AttentionEngine); 2] = [("fused", AttentionEngine::Fused), ("gemms", AttentionEngine::Batched)];

/// Times both passes and each, in bf16, by kernels that keep scores in registers and by batched GEMMs with a softmax.
fn attention(device: &Device, shape: AttentionShape, rounds: u32) -> Result<Vec<AttentionRow>> {
    type Bf16 = half::bf16;
    let stream = device.context().new_stream()?;
    let context = LayerContext::on_stream(device, stream.clone());
    let mut timer = Timer::new(device, &stream)?;
    let mut random = Random::new();
    let mut up = |len: usize| -> Result<DeviceBuffer> {
        // The sum of four is bell-shaped enough.
        let values: Vec<Bf16> =
            (0..len).map(|_| Bf16::from_f32((0..4).map(|_| random.float()).sum::<f32>() * 0.5)).collect();
        Ok(DeviceBuffer::from_host(&context, &values)?)
    };
    let (queries, keys) = (shape.query_len()?, shape.key_len()?);
    let (q, k, v, dout) = (up(queries)?, up(keys)?, up(keys)?, up(queries)?);
    let zeros = |len| DeviceBuffer::zeros(&context, Bf16::DTYPE, len).map(RefCell::new);
    let (out, dq, dk, dv) = (zeros(queries)?, zeros(queries)?, zeros(keys)?, zeros(keys)?);
    let lse = RefCell::new(DeviceBuffer::zeros(&context, DataType::F32, shape.lse_len()?)?);
    let inputs = AttentionInputs { q: q.as_slice(), k: k.as_slice(), v: v.as_slice() };

    let forward = |engine| -> Result<()> {
        let (mut out, mut lse) = (out.borrow_mut(), lse.borrow_mut());
        Ok(attention_forward(&context, shape, engine, inputs, out.as_slice_mut(), lse.as_slice_mut())?)
    };
    let backward = |engine| -> Result<()> {
        let (out, lse) = (out.borrow(), lse.borrow());
        let (mut dq, mut dk, mut dv) = (dq.borrow_mut(), dk.borrow_mut(), dv.borrow_mut());
        let to = AttentionGradients { q: dq.as_slice_mut(), k: dk.as_slice_mut(), v: dv.as_slice_mut() };
        let saved = (out.as_slice(), lse.as_slice(), dout.as_slice());
        Ok(attention_backward(&context, shape, engine, inputs, saved, to)?)
    };
    let both = |engine| forward(engine).and_then(|()| backward(engine));

    // Operations of a product over the scores.
    let product =
        2.0 * (shape.lse_len()? * shape.positions * shape.head_dim) as f64 / if shape.causal { 2.0 } else { 1.0 };
    let (mut parts, mut contenders) = (Vec::new(), Vec::<Contender<'_, anyhow::Error>>::new());
    for (name, engine) in ENGINES {
        prepare_attention(&context, shape, engine, Bf16::DTYPE)?;
        both(engine)?;
        parts.extend([("forward", 2.0), ("backward", 5.0), ("both", 7.0)]);
        contenders.push(Contender::new(name, "", move || forward(engine)));
        contenders.push(Contender::new(name, "", move || backward(engine)));
        contenders.push(Contender::new(name, "", move || both(engine)));
    }
    let times = timer.alternate(&mut contenders, rounds)?;
    let row = |(time, (part, products)): (Time, (&'static str, f64))| AttentionRow {
        dtype: Bf16::DTYPE.name(),
        shape: [shape.batch, shape.positions, shape.heads, shape.head_dim],
        causal: shape.causal,
        contender: time.contender,
        part,
        us: time.us,
        min_us: time.min_us,
        max_us: time.max_us,
        tflops: products * product / time.us * 1e-6,
    };
    Ok(times.into_iter().zip(parts).map(row).collect())
}
