//! `twofour shrink`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use twofour::file::{self, Convert, Reader};
use twofour_nn::model::{BlockSizes, Calibration, KeptParts, PartScores, SavedModel, Shrinking, open_blockwise};

use super::{
    model::expect_model,
    next,
    output::{BesideAnswer, OutputOptions, path, show},
    prune::{method::CalibrationOptions, own_text::Pieces, sampling::Sampling},
};
use crate::{
    exit::{Usage, Verdict},
    hub, interrupt,
    present::{
        Screen, escape,
        table::{Align, Table},
        units,
    },
};

/// Remove hidden features and attention heads, and write the smaller model
#[derive(Debug, Args)]
#[command(long_about = long_about(), after_long_help = "\
Examples:
  twofour shrink model/ -o small/ --features 3648
  twofour shrink model/ -o small/ --features 3648 --heads 12 \\
      --calibration text.txt
  twofour shrink model/ -o small/ --kv-heads 4
  twofour shrink model.gguf -o small/ --features 3648

Score of a part: by magnitude the sum of the squares of its weights; by wanda, with calibration, Σ ‖x_j‖² Σ_i w_ij² \
over its features, where x is what the layer behind it reads. A head of keys and values has the scores of all heads of \
queries that read it. Prune to 2:4 afterwards: columns that go change the groups.")]
pub(crate) struct Shrink {
    /// The model: a directory, a .gguf file, or OWNER/NAME or OWNER/NAME@REVISION on the Hugging Face hub
    input: PathBuf,

    #[command(flatten)]
    output: OutputOptions,

    /// Hidden features that each feed-forward block keeps (`intermediate_size`) [default: all]
    #[arg(long, value_name = "N", required_unless_present_any = ["heads", "kv_heads"])]
    features: Option<usize>,

    /// Heads of queries that each block keeps (`num_attention_heads`), as many for each head of keys and values
    /// [default: those of the heads of keys and values that are kept]
    #[arg(long, value_name = "N")]
    heads: Option<usize>,

    /// Heads of keys and values that each block keeps (`num_key_value_heads`) [default: all, or --heads where each is
    /// read by one head of queries]
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,

    /// How parts are scored [default: magnitude; with --calibration wanda]
    #[arg(long, value_enum)]
    method: Option<Method>,

    #[command(flatten)]
    calibration: CalibrationOptions,
}

/// The description of the command in its `--help`.
fn long_about() -> String {
    let [shrunk, features] = Shrinking::families().map(|names| names.join(", "));
    format!(
        "Remove hidden features and attention heads, and write the smaller model\n\nStructured pruning: hidden \
         features of the feed-forward blocks (rows of gate and up, columns of down) and heads of attention (rows of \
         queries, keys and values, columns of the output) that score least are left out, with their biases. The \
         result has dense weights of smaller shapes and a config.json with the new sizes: transformers and other \
         programs load it as a model of its family, and it computes what the model with zeros in their place does. \
         Every block keeps as many, since config.json has one number for all; which ones is each block's own.\n\n\
         Families: {shrunk}. Hidden features alone, since heads have no size of their own in config.json: {features}."
    )
}

/// How parts are scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Method {
    /// By their weights
    Magnitude,
    /// By weights and activations; requires --calibration
    Wanda,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    #[serde(serialize_with = "path")]
    output: &'a PathBuf,
    method: Method,
    /// Tokens that the model ran on.
    #[serde(skip_serializing_if = "Option::is_none")]
    calibration_tokens: Option<usize>,
    before: Size,
    after: Size,
    blocks: Vec<BlockAnswer>,
    beside: BesideAnswer,
}

/// The size of a model.
#[derive(Debug, Clone, Copy, Serialize)]
struct Size {
    features: usize,
    heads: usize,
    kv_heads: usize,
    parameters: usize,
    bytes: usize,
}

/// What went from a block.
#[derive(Debug, Serialize)]
struct BlockAnswer {
    removed_features: Vec<usize>,
    removed_heads: Vec<usize>,
    removed_kv_heads: Vec<usize>,
    /// The share of the scores that is kept.
    kept_of_features: f64,
    kept_of_heads: f64,
}

impl Shrink {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let sampling = self.calibration.sampling();
        let method = match (self.method, &sampling) {
            (Some(Method::Wanda), None) => {
                bail!(Usage("--method wanda requires --calibration TEXT, a text file to run the model on".to_owned()))
            }
            (Some(Method::Magnitude), Some(_)) => {
                bail!(Usage("--calibration has no effect on --method magnitude; leave out one of them".to_owned()))
            }
            (Some(method), _) => method,
            (None, Some(_)) => Method::Wanda,
            (None, None) => Method::Magnitude,
        };
        let (output, overwrite) = (self.output.output.clone(), self.output.overwrite());
        self.input = SavedModel::locate(&hub::locate(&self.input, screen)?);
        let shrinking = Shrinking::open(&self.input, |sizes| self.sizes(sizes))?;
        let reader = shrinking.reader();
        expect_model(reader)?;
        let is_whole = reader.directory().is_some() || !reader.described().is_empty();
        if !is_whole || output.extension().is_some_and(|extension| extension == "safetensors") {
            bail!(Usage(
                "a smaller model requires its own config.json: name a directory to read and one to write".to_owned()
            ));
        }
        file::check_output(reader, &output, overwrite)?;
        let before = size(reader, shrinking.before());
        let sizes = shrinking.after();
        let (scores, calibration_tokens) = match &sampling {
            None => (by_magnitude(screen, &shrinking)?, None),
            Some(sampling) => {
                let (scores, tokens) = by_inputs(screen, &shrinking, (&self.input, sampling))?;
                (scores, Some(tokens))
            }
        };
        let kept: Vec<KeptParts> = scores.iter().map(|scores| shrinking.kept(scores)).collect();
        let blocks: Vec<BlockAnswer> = kept.iter().zip(&scores).map(|(kept, scores)| answer(kept, scores)).collect();
        let small = shrinking.shrunk(&kept)?;
        let after = size(&small, sizes);
        let guard = interrupt::guard();
        let mut progress = screen.progress();
        let convert = Convert::new(small).overwrite(overwrite).progress(|p| show(&mut progress, p));
        convert.run(&output, file::Unchanged)?;
        drop(progress);
        drop(guard);
        tell(screen, &blocks, [before, after])?;
        screen.line(format!("written to {}", escape::path(&output)))?;
        let beside = BesideAnswer::of(&self.input, &output)?;
        beside.tell(screen)?;
        let mut commands = next::run(&output, None);
        commands.push(next::prune(&output));
        screen.next(&commands)?;
        screen.json(&Answer { output: &output, method, calibration_tokens, before, after, blocks, beside })?;
        Ok(Verdict::Yes)
    }

    /// The sizes that blocks of these sizes are to have.
    fn sizes(&self, before: BlockSizes) -> BlockSizes {
        let group = before.heads / before.kv_heads.max(1);
        let kv_heads = match (self.kv_heads, self.heads) {
            (Some(kv_heads), _) => kv_heads,
            (None, Some(heads)) if group == 1 => heads,
            (None, _) => before.kv_heads,
        };
        BlockSizes {
            features: self.features.unwrap_or(before.features),
            heads: self.heads.unwrap_or(group.saturating_mul(kv_heads)),
            kv_heads,
        }
    }
}

fn size(reader: &Reader, sizes: BlockSizes) -> Size {
    let BlockSizes { features, heads, kv_heads } = sizes;
    let parameters = reader.tensors().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
    Size { features, heads, kv_heads, parameters, bytes: reader.tensors().map(|tensor| tensor.bytes).sum() }
}

fn by_magnitude(screen: &Screen, shrinking: &Shrinking) -> Result<Vec<PartScores>> {
    let (mut progress, blocks) = (screen.progress(), shrinking.blocks());
    let score = |block: usize| {
        interrupt::check()?;
        progress.steps(&format!("block {}", block + 1), block as u64, blocks as u64);
        Ok(shrinking.by_magnitude(block)?)
    };
    (0..blocks).map(score).collect()
}

/// Scores on calibration text, and the tokens that were seen.
fn by_inputs(
    screen: &Screen,
    shrinking: &Shrinking,
    (input, sampling): (&Path, &Sampling),
) -> Result<(Vec<PartScores>, usize)> {
    let checkpoint = open_blockwise(input)?;
    let pieces = Pieces::of(screen, (checkpoint.as_ref(), input), sampling)?;
    let tokens = pieces.tokens.iter().map(|piece| piece.len() - pieces.prompt).sum();
    let calibration = Calibration::new(checkpoint.as_ref(), &pieces.tokens)?;
    let mut calibration = calibration.behind_prompt(pieces.prompt).stopped_by(&interrupt::requested);
    let (mut progress, blocks, mut scores) = (screen.progress(), shrinking.blocks() as u64, vec![]);
    while !calibration.is_finished() {
        progress.steps(&format!("block {}", calibration.block() + 1), calibration.block() as u64, blocks);
        scores.push(shrinking.by_inputs(&calibration)?);
        calibration.advance(&|_| None)?;
    }
    Ok((scores, tokens))
}

fn answer(kept: &KeptParts, scores: &PartScores) -> BlockAnswer {
    let removed = |kept: &[usize], all: usize| (0..all).filter(|part| kept.binary_search(part).is_err()).collect();
    let share = |kept: &[usize], scores: &[f64]| {
        let all: f64 = scores.iter().sum();
        let own: f64 = kept.iter().filter_map(|part| scores.get(*part)).sum();
        if all > 0.0 { own / all } else { 1.0 }
    };
    BlockAnswer {
        removed_features: removed(&kept.features, scores.features.len()),
        removed_heads: removed(&kept.heads, scores.heads.len()),
        removed_kv_heads: removed(&kept.kv_heads, scores.kv_heads.len()),
        kept_of_features: share(&kept.features, &scores.features),
        kept_of_heads: share(&kept.heads, &scores.heads),
    }
}

/// Shows what became smaller; with `--verbose` what each block lost.
fn tell(screen: &mut Screen, blocks: &[BlockAnswer], [before, after]: [Size; 2]) -> Result<()> {
    let list = |parts: &[usize]| parts.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
    if screen.is_detailed() {
        let mut table = Table::new([
            ("block", Align::Right),
            ("features removed", Align::Right),
            ("their score kept", Align::Right),
            ("heads removed", Align::Left),
            ("their score kept", Align::Right),
        ]);
        for (index, block) in blocks.iter().enumerate() {
            table.row([
                index.to_string(),
                units::count(block.removed_features.len()),
                units::percent(block.kept_of_features),
                list(&block.removed_heads),
                units::percent(block.kept_of_heads),
            ]);
        }
        screen.line(table)?;
    }
    let mean = |of: fn(&BlockAnswer) -> f64| blocks.iter().map(of).sum::<f64>() / blocks.len().max(1) as f64;
    for (what, before, after, kept) in [
        ("hidden features", before.features, after.features, mean(|block| block.kept_of_features)),
        ("heads", before.heads, after.heads, mean(|block| block.kept_of_heads)),
        ("heads of keys and values", before.kv_heads, after.kv_heads, mean(|block| block.kept_of_heads)),
    ] {
        if after < before {
            let (before, after, kept) = (units::count(before), units::count(after), units::percent(kept));
            screen.line(format!("{what} of a block: {before} -> {after}, with {kept} of their score in the mean"))?;
        }
    }
    let parameters = [before, after].map(|size| units::count(size.parameters));
    let bytes = [before, after].map(|size| units::bytes(size.bytes as u64));
    screen.line(format!("{} -> {} parameters, {} -> {}", parameters[0], parameters[1], bytes[0], bytes[1]))?;
    Ok(())
}
