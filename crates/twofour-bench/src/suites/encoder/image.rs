//! The suite `encoder` of an image encoder.

use std::path::Path;

use anyhow::{Result, bail};
use half::{bf16, f16};
use serde::Serialize;
use twofour::DataType;
use twofour_cli::{
    device::ComputeDevice,
    exit::Usage,
    interrupt,
    measure::{self, median, random::Random},
    present::{
        Screen,
        style::{self, paint},
        table::Table,
        units,
    },
};
use twofour_nn::model::{ImageCheckpoint, ImageWeights, SavedModel, TransformerConfig, WeightForm};

use super::{
    cuda_images::CudaImages,
    images::{CpuImages, ImageContenders, ImageSource},
    measured::Measured,
    place::Place,
};

const fn weights(attention: WeightForm, up: WeightForm, down: WeightForm) -> ImageWeights {
    ImageWeights { attention, up, down }
}

use WeightForm::{Dense, DenseInt8, TwoFour, TwoFourInt8};

/// The forms of random weights that are compared. `up` is SAM's `lin1`, and `down` its `lin2`.
const FORMS: [(&str, ImageWeights); 8] = [
    ("dense", weights(Dense, Dense, Dense)),
    ("int8 attention and MLP", weights(DenseInt8, DenseInt8, DenseInt8)),
    ("int8 attention", weights(DenseInt8, Dense, Dense)),
    ("int8 2:4 lin1", weights(Dense, TwoFourInt8, Dense)),
    ("2:4 lin2", weights(Dense, Dense, TwoFour)),
    ("int8 attention, int8 2:4 lin1, 2:4 lin2", weights(DenseInt8, TwoFourInt8, TwoFour)),
    ("2:4 MLP", weights(Dense, TwoFour, TwoFour)),
    ("2:4 attention and MLP", weights(TwoFour, TwoFour, TwoFour)),
];

/// The image encoder that is measured.
pub(super) enum ImageModel {
    Checkpoint(Box<ImageCheckpoint>),
    Shape(Box<TransformerConfig>),
}

/// How it is measured.
pub(super) struct ImageOptions<'a> {
    pub(super) model: String,
    pub(super) command: String,
    pub(super) batch: &'a [u32],
    pub(super) rounds: u32,
    pub(super) dtype: Option<DataType>,
    pub(super) device: &'a ComputeDevice,
}

/// The answer.
#[derive(Debug, Serialize)]
pub(super) struct ImageAnswer {
    machine: Measured,
    command: String,
    model: String,
    dtype: String,
    /// Height and width, in pixels.
    image: [usize; 2],
    /// Tokens of an image.
    tokens: usize,
    /// Of the last minute, before each batch size; null where the operating system does not tell.
    load_average: Vec<Option<f64>>,
    rows: Vec<Row>,
}

/// One contender at one size of a batch.
#[derive(Debug, Serialize)]
struct Row {
    weights: String,
    batch: usize,
    /// Medians over the rounds.
    ms: f64,
    images_per_s: f64,
    /// The median of the rounds' ratios, the first contender's time over this one's.
    speedup: f64,
    /// Bytes of the blocks' linear weights.
    weight_bytes: usize,
    /// Bytes of device memory that are allocated: weights, the batch, what lies between the layers, and workspace. Null
    /// on a CPU.
    allocated_bytes: Option<usize>,
    /// Seconds of each round.
    seconds: Vec<f64>,
}

impl ImageModel {
    /// The image encoder that a path or a name means; none where it means no such model.
    pub(super) fn find(path: &Path) -> Result<Option<Self>> {
        let directory = SavedModel::locate(path);
        if ImageCheckpoint::is_at(&directory) {
            return Ok(Some(ImageModel::Checkpoint(Box::new(ImageCheckpoint::open(directory)?))));
        }
        let name = path.to_str().filter(|_| !path.exists());
        let config = name.and_then(TransformerConfig::named).filter(|config| config.image().is_ok());
        Ok(config.map(|config| ImageModel::Shape(Box::new(config))))
    }

    fn config(&self) -> &TransformerConfig {
        match self {
            ImageModel::Checkpoint(checkpoint) => checkpoint.config(),
            ImageModel::Shape(config) => config,
        }
    }

    /// The type that the weights are stored in; of random ones, what is chosen.
    fn dtype(&self) -> DataType {
        match self {
            ImageModel::Checkpoint(checkpoint) => checkpoint.dtype(),
            ImageModel::Shape(_) => DataType::BF16,
        }
    }

    /// Measures it.
    pub(super) fn run(&self, options: &ImageOptions<'_>, screen: &mut Screen) -> Result<ImageAnswer> {
        let forms: Vec<ImageWeights> = FORMS.iter().map(|(_, weights)| *weights).collect();
        let (source, names): (_, Vec<&str>) = match self {
            ImageModel::Checkpoint(checkpoint) => (ImageSource::Checkpoint(checkpoint), vec!["dense", "as stored"]),
            ImageModel::Shape(config) => {
                (ImageSource::Random(config, &forms), FORMS.iter().map(|(name, _)| *name).collect())
            }
        };
        let place = Place::new(options.device, options.dtype, self.dtype())?;
        let mut progress = screen.progress();
        let mut loading = |index: usize| progress.steps("weights", index as u64, names.len() as u64);
        let contenders: Box<dyn ImageContenders> = match (&place.gpu, place.dtype) {
            (Some(device), dtype) => Box::new(CudaImages::new(device, source, dtype, &mut loading)?),
            (None, DataType::BF16) => Box::new(CpuImages::<bf16>::new(source, &mut loading)?),
            (None, DataType::F16) => Box::new(CpuImages::<f16>::new(source, &mut loading)?),
            (None, _) => Box::new(CpuImages::<f32>::new(source, &mut loading)?),
        };
        let bytes = contenders.weight_bytes();
        if matches!(self, ImageModel::Checkpoint(_)) && bytes[0] <= bytes[1] {
            bail!(Usage(format!(
                "{}: no linear layer is 2:4, so there is nothing to compare; prune it first: twofour prune",
                options.model
            )));
        }
        let mut answer = ImageAnswer {
            machine: place.measured()?,
            command: options.command.clone(),
            model: options.model.clone(),
            dtype: place.dtype.to_string(),
            image: self.config().image()?.image,
            tokens: self.config().context(),
            load_average: vec![],
            rows: vec![],
        };
        for &batch in options.batch {
            answer.load_average.push(measure::load_average());
            let what = format!("batch {batch}");
            let mut step = |done: u64, of: u64| progress.steps(&what, done, of);
            answer.rows.extend(rows(&*contenders, &names, (batch as usize, options.rounds), &mut step)?);
        }
        Ok(answer)
    }
}

/// Measures every contender at one size of a batch, interleaved in shuffled order.
fn rows(
    contenders: &dyn ImageContenders,
    names: &[&str],
    (batch, rounds): (usize, u32),
    step: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Row>> {
    let mut passes = contenders.begin(batch, &mut |_| step(0, 1))?;
    let mut seconds = vec![vec![]; passes.len()];
    // The same orders in every run.
    let mut random = Random::new();
    let mut order: Vec<usize> = (0..passes.len()).collect();
    // The round before the first warms up.
    for round in 0..=rounds {
        step(u64::from(round), u64::from(rounds) + 1);
        random.shuffle(&mut order);
        for &which in &order {
            interrupt::check()?;
            let found = (passes[which].seconds)()?;
            if round > 0 {
                seconds[which].push(found);
            }
        }
    }
    let memory: Vec<_> = passes.iter().map(|pass| pass.allocated_bytes).collect();
    let first = seconds.first().cloned().unwrap_or_default();
    let row = |(index, seconds): (usize, Vec<f64>)| {
        let own = median(&mut seconds.clone());
        let ratios = first.iter().zip(&seconds).map(|(first, own)| first / own);
        Row {
            weights: names[index].to_owned(),
            batch,
            ms: 1e3 * own,
            images_per_s: batch as f64 / own,
            speedup: median(&mut ratios.collect::<Vec<_>>()),
            weight_bytes: contenders.weight_bytes()[index],
            allocated_bytes: memory[index],
            seconds,
        }
    };
    Ok(seconds.into_iter().enumerate().map(row).collect())
}

impl ImageAnswer {
    pub(super) fn tell(&self, screen: &mut Screen) -> Result<()> {
        screen.line(&self.machine)?;
        let [height, width] = self.image;
        let ImageAnswer { model, dtype, tokens, .. } = self;
        screen.line(format!("{model}: {dtype}, images of {height}x{width}, {tokens} tokens each"))?;
        self.machine.warn_if_busy(self.load_average.first().copied().flatten(), screen)?;
        screen.line("")?;
        let mut table = Table::of(["weights"], ["batch", "ms", "images/s", "speedup", "linear layers", "memory"]);
        for row in &self.rows {
            table.row([
                row.weights.clone(),
                row.batch.to_string(),
                format!("{:.1}", row.ms),
                format!("{:.2}", row.images_per_s),
                paint(style::STRONG, format!("{:.2}x", row.speedup)),
                units::bytes(row.weight_bytes as u64),
                row.allocated_bytes.map_or(String::new(), |bytes| units::bytes(bytes as u64)),
            ]);
        }
        screen.line(table)
    }
}
