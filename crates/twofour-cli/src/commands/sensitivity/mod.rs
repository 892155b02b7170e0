//! `twofour sensitivity`.

mod layer;
mod measure;
mod perplexity;
mod picture;
mod plan;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use twofour::{
    Pattern,
    solve::{METHODS, Method, Pruning, Refit, method},
};
use twofour_nn::model::{Checkpoint, SavedModel, open_blockwise};

pub(crate) use self::plan::Plan;
use self::{
    layer::Layer,
    perplexity::{DensePerplexity, Judge},
    plan::Budget,
};
use super::{
    model::expect_model,
    prune::{own_text::Pieces, sampling::Sampling},
};
use crate::{
    exit::{Usage, Verdict},
    hub,
    present::{
        Screen, escape,
        layers::by_layer,
        shell::word,
        table::{Align, Table},
        units,
    },
    selection::SelectionOptions,
};

/// Show what pruning each layer alone costs, and plan which layers stay dense
///
/// Runs the dense model on a text, block by block, prunes each linear layer by each method, and shows the squared
/// change of its outputs by their square. With --perplexity also the perplexity of the model with that layer alone
/// pruned, by the last of the methods. With --budget a plan: of the layers that cost least for what they save, as many
/// as the budget allows are to be pruned. `twofour prune --plan FILE` takes it.
///
/// It takes about as long as `twofour prune --tune 0` with the same text for each of the methods. --perplexity runs the
/// model once for each layer: 0.5 B parameters in 168 layers take 15 to 30 minutes on two cores for 2048 tokens.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour sensitivity model/ --calibration text.txt --picture layers.svg
  twofour sensitivity model/ --calibration text.txt --budget sparse=0.4 \\
      -o plan.json
  twofour sensitivity model/ --calibration text.txt --perplexity other.txt \\
      --budget perplexity=1.05x -o plan.json
  twofour prune model/ -o pruned/ --calibration text.txt --plan plan.json")]
pub(crate) struct Sensitivity {
    /// The model: a directory, a .gguf file, or OWNER/NAME or OWNER/NAME@REVISION on the Hugging Face hub
    model: PathBuf,

    #[command(flatten)]
    selection: SelectionOptions,

    /// A text file, or `self` for text that the model writes; may be repeated: pieces are taken of each in turn
    #[arg(long, value_name = "TEXT", required = true)]
    calibration: Vec<PathBuf>,

    /// How many pieces in all, from random places
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,

    /// Tokens of a piece [default: 512, or the model's context where that is shorter]
    #[arg(long, value_name = "L", value_parser = clap::value_parser!(u32).range(1..))]
    length: Option<u32>,

    /// Seed of the random places
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// The methods, with commas between; +refit behind one refits what it keeps
    #[arg(long, value_name = "METHODS", value_delimiter = ',', value_parser = pruning,
          default_value = "magnitude,wanda,sparsegpt,alps+refit")]
    methods: Vec<Named>,

    /// Also measure the perplexity of this text with each layer alone pruned
    #[arg(long, value_name = "TEXT")]
    perplexity: Option<PathBuf>,

    /// Tokens of --perplexity, from the beginning of the text
    #[arg(long, value_name = "N", default_value_t = 2048, requires = "perplexity",
          value_parser = clap::value_parser!(u32).range(2..))]
    tokens: u32,

    /// What may be lost, or is to be saved: perplexity=1.05x (of the dense one; requires --perplexity), bytes=N of all
    /// weights, or sparse=SHARE of the chosen weights
    #[arg(long, value_name = "BUDGET")]
    budget: Option<Budget>,

    /// Write the plan to this file; requires --budget
    #[arg(long, short, value_name = "FILE", requires = "budget")]
    output: Option<PathBuf>,

    /// Draw the errors, block by block, as an SVG
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,

    /// Replace files that exist
    #[arg(long, short)]
    force: bool,
}

/// A method with what follows it.
#[derive(Debug, Clone)]
struct Named {
    name: String,
    pruning: Pruning,
}

fn pruning(text: &str) -> Result<Named, String> {
    let (name, refit) = match text.strip_suffix("+refit") {
        Some(name) => (name, Refit::default().steps),
        None => (text, 0),
    };
    let Some(method) = method(name) else {
        let names: Vec<&str> = METHODS.iter().map(|method: &&dyn Method| method.name()).collect();
        return Err(format!("no method is named `{name}`; there are {}", names.join(", ")));
    };
    Ok(Named { name: text.to_owned(), pruning: Pruning { refit, ..Pruning::new(method, Pattern::TWO_FOUR) } })
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    /// Tokens that the model ran on.
    calibration_tokens: usize,
    methods: Vec<&'a str>,
    perplexity: Option<DensePerplexity>,
    layers: Vec<LayerAnswer<'a>>,
    plan: Option<&'a Plan>,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct LayerAnswer<'a> {
    name: &'a str,
    shape: [usize; 2],
    /// The squared change of the outputs by their square, by method.
    errors: BTreeMap<&'a str, f64>,
    /// Of the model with this layer alone pruned.
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<f64>,
}

impl Sensitivity {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let begin = Instant::now();
        if matches!(self.budget, Some(Budget::Perplexity(_))) && self.perplexity.is_none() {
            bail!(Usage("--budget perplexity=… requires --perplexity TEXT, on which it is measured".to_owned()));
        }
        let written: Vec<&PathBuf> = self.output.iter().chain(&self.picture).collect();
        for path in written {
            if path.exists() && !self.force {
                bail!(Usage(format!("{} exists already; give another name or --force", path.display())));
            }
        }
        let globs = self.selection.globs()?;
        let given = self.model.clone();
        self.model = hub::locate(&self.model, screen)?;
        let path = SavedModel::locate(&self.model);
        let checkpoint = open_blockwise(&path)?;
        expect_model(checkpoint.reader())?;
        let selection = globs.of_model(checkpoint.reader())?;
        let sampling = Sampling {
            texts: self.calibration.clone(),
            samples: self.samples as usize,
            length: self.length.map(|length| length as usize),
            seed: self.seed,
        };
        let mut judge = match &self.perplexity {
            Some(text) => Some(Judge::new(screen, Checkpoint::open(&path)?, text, self.tokens as usize)?),
            None => None,
        };
        let pieces = Pieces::of(screen, (checkpoint.as_ref(), &self.model), &sampling)?;
        let calibration_tokens = pieces.tokens.iter().map(|piece| piece.len() - pieces.prompt).sum();
        let prunings: Vec<Pruning> = self.methods.iter().map(|named| named.pruning).collect();
        let layers = measure::layers(screen, checkpoint.as_ref(), pieces, &selection, &prunings, judge.as_mut())?;
        if layers.is_empty() {
            bail!("{}: no chosen tensor is a weight of the model's blocks", self.model.display());
        }
        let dense = judge.as_ref().map(Judge::dense);
        let plan = match self.budget {
            Some(budget) => Some(Plan::under(budget, &layers, checkpoint.reader(), dense)?),
            None => None,
        };
        self.show(screen, &layers, dense)?;
        if let Some(plan) = &plan {
            plan.tell(screen)?;
        }
        if let Some(file) = &self.picture {
            let names: Vec<&str> = self.methods.iter().map(|named| named.name.as_str()).collect();
            write(file, &picture::draw(&names, &layers)?)?;
            screen.line(format_args!("picture written to {}", escape::path(file)))?;
        }
        if let (Some(file), Some(plan)) = (&self.output, &plan) {
            write(file, &plan.text()?)?;
            screen.line(format_args!("plan written to {}", escape::path(file)))?;
            let texts: String = self.calibration.iter().map(|text| format!(" --calibration {}", word(text))).collect();
            screen.next(&[format!("twofour prune {} -o OUTPUT{texts} --plan {}", word(&given), word(file))])?;
        }
        screen.json(&Answer {
            calibration_tokens,
            methods: self.methods.iter().map(|named| named.name.as_str()).collect(),
            perplexity: dense,
            layers: layers.iter().map(|layer| self.answer(layer)).collect(),
            plan: plan.as_ref(),
            seconds: begin.elapsed().as_secs_f64(),
        })?;
        Ok(Verdict::Yes)
    }

    fn answer<'a>(&'a self, layer: &'a Layer) -> LayerAnswer<'a> {
        let errors = self.methods.iter().map(|named| named.name.as_str()).zip(layer.errors.iter().copied()).collect();
        LayerAnswer { name: &layer.name, shape: layer.shape, errors, perplexity: layer.perplexity }
    }

    /// Prints a row for each kind of layer, or for each layer.
    fn show(&self, screen: &mut Screen, layers: &[Layer], dense: Option<DensePerplexity>) -> Result<()> {
        let mut columns = vec![("layers".to_owned(), Align::Left), ("shape".to_owned(), Align::Right)];
        columns.extend(self.methods.iter().map(|named| (named.name.clone(), Align::Right)));
        if dense.is_some() {
            columns.push(("perplexity".to_owned(), Align::Right));
        }
        let mut table = Table::new(columns);
        for (label, group) in by_layer(layers, screen.is_detailed(), |layer| (layer.name.as_str(), layer.shape)) {
            let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len().max(1) as f64;
            let mut cells = vec![label, units::shape(&group[0].shape)];
            for index in 0..self.methods.len() {
                cells.push(units::percent(mean(group.iter().map(|layer| layer.errors[index]).collect())));
            }
            if dense.is_some() {
                let found = group.iter().filter_map(|layer| layer.perplexity).collect();
                cells.push(format!("{:.3}", mean(found)));
            }
            table.row(cells);
        }
        screen.line(table)?;
        screen.note("the squared change of a layer's outputs by their square, where it alone is pruned to 2:4")?;
        if let Some(DensePerplexity { perplexity, tokens, .. }) = dense {
            screen.line(format_args!("perplexity of the dense model {perplexity:.4} over {tokens} tokens"))?;
        }
        Ok(())
    }
}

/// Writes a file whole or not at all.
fn write(path: &Path, text: &str) -> Result<()> {
    let failed = |source| twofour::Error::Io { path: path.to_owned(), action: "writing it", source };
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
    fs::write(file.path(), text).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}
