//! Structured pruning: hidden features and heads are removed, and the layers around them become smaller.
//!
//! A hidden feature of a feed-forward block is a row of the layers before it, gate and up, and a column of the layer
//! behind it, down. A head of queries is a run of rows of the queries' layer and of columns of the layer behind
//! attention. A head of keys and values goes with all heads of queries that read it. Without them the model computes
//! what it did with zeros in their place.
//!
//! `config.json` has one number for all blocks, so that every block keeps as many; which ones is each block's own.

use std::collections::HashMap;

use serde_json::Value;
use twofour::{
    MatrixRef,
    calibration::InputNorms,
    file::{Reader, Reorder},
};

use super::{
    Calibration, CheckpointError, TransformerConfig,
    checkpoint::{CONFIG_FILE, Opened, kind},
    families::{Family, Kind, SizeFields, Source, fields::Fields, layout::StoredLinear},
    inference::layer::Role,
};
use crate::{Error, Result};

/// Sizes that every block of a model has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Hidden features of the feed-forward block.
    pub features: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`.
    pub kv_heads: usize,
}

/// What a block keeps, in ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptParts {
    /// Hidden features of the feed-forward block.
    pub features: Vec<usize>,
    /// Heads of queries.
    pub heads: Vec<usize>,
    /// Heads of keys and values.
    pub kv_heads: Vec<usize>,
}

/// The scores of a block's parts: parts with the highest ones are kept.
#[derive(Debug, Clone, PartialEq)]
pub struct PartScores {
    /// Scores of hidden features.
    pub features: Vec<f64>,
    /// Scores of heads of queries.
    pub heads: Vec<f64>,
    /// Scores of heads of keys and values: each the sum of the heads of queries that read it; by magnitude, with its
    /// own weights.
    pub kv_heads: Vec<f64>,
}

/// A model whose blocks are to become smaller.
#[derive(Debug)]
pub struct Shrinking {
    opened: Opened,
    fields: Fields,
    family: &'static Family,
    size_fields: SizeFields,
    sizes: BlockSizes,
}

impl Shrinking {
    /// Opens a directory of a decoder or an encoder, or a GGUF file. `sizes` returns what its blocks are to have, given
    /// what they have.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`](super::Checkpoint::open); [`CheckpointError::UnsupportedModel`] for a family whose
    /// sizes are not known; [`CheckpointError::DType`] for weights that are not floats; [`Error::Setting`] for sizes
    /// that the model cannot be shrunk to, and for those that it has.
    pub fn open(path: impl AsRef<std::path::Path>, sizes: impl FnOnce(BlockSizes) -> BlockSizes) -> Result<Self> {
        let path = path.as_ref();
        let found = kind(path)?.filter(|kind| *kind != Kind::Image).unwrap_or(Kind::Decoder);
        let (opened, fields) = Opened::new(path, found)?;
        let name = fields.text_if("model_type")?.unwrap_or_default();
        let family = Family::named(name).and_then(|family| Some((family, family.sizes?)));
        let Some((family, size_fields)) = family else {
            return Err(CheckpointError::UnsupportedModel {
                path: fields.path().to_owned(),
                found: format!("`{name}`"),
                supported: Self::families().concat().join(", "),
            }
            .into());
        };
        expect_floats(&opened)?;
        let sizes = sizes(sizes_of(&opened.config));
        expect_sizes(&opened.config, &size_fields, sizes)?;
        Ok(Shrinking { opened, fields, family, size_fields, sizes })
    }

    /// The `model_type`s of the families whose blocks can be made smaller: those of which hidden features and heads can
    /// be removed, and those of which hidden features alone can.
    pub fn families() -> [Vec<&'static str>; 2] {
        let named = |has_heads: bool| {
            let is_of = |family: &&Family| family.sizes.is_some_and(|sizes| sizes.heads.is_some() == has_heads);
            Family::all().filter(is_of).map(|family| family.name).collect()
        };
        [named(true), named(false)]
    }

    /// The files of weights, as they are stored.
    pub fn reader(&self) -> &Reader {
        &self.opened.reader
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.opened.config.layers
    }

    /// The sizes of a block before.
    pub fn before(&self) -> BlockSizes {
        sizes_of(&self.opened.config)
    }

    /// The sizes of a block afterwards.
    pub fn after(&self) -> BlockSizes {
        self.sizes
    }

    /// Scores by magnitude: the sum of the squares of all weights that a part has.
    ///
    /// # Errors
    /// Those of reading; a weight that is not finite, with its place.
    pub fn by_magnitude(&self, block: usize) -> Result<PartScores> {
        let config = &self.opened.config;
        let (queries, keys) = (config.query_width(), config.kv_width());
        let [up, down, qkv, out] = [
            self.rows(block, Role::Up)?,
            self.columns(block, Role::Down)?,
            self.rows(block, Role::Qkv)?,
            self.columns(block, Role::Out)?,
        ];
        let hidden = config.feed_forward.hidden;
        let features = (0..hidden).map(|feature| {
            let before: f64 = up.iter().skip(feature).step_by(hidden).sum();
            before + down[feature]
        });
        let head =
            |squares: &[f64], first: usize| -> f64 { squares[first..first + config.attention.head_dim].iter().sum() };
        let places = |heads: usize| (0..heads).map(|head| head * config.attention.head_dim);
        let heads: Vec<f64> =
            places(config.attention.heads).map(|first| head(&out, first) + head(&qkv, first)).collect();
        let own = places(config.attention.kv_heads)
            .map(|first| head(&qkv, queries + first) + head(&qkv, queries + keys + first));
        let kv_heads = own.zip(heads.chunks(self.group())).map(|(own, heads)| own + heads.iter().sum::<f64>());
        Ok(PartScores { features: features.collect(), kv_heads: kv_heads.collect(), heads })
    }

    /// Scores by what a part adds to the layer behind it on calibration text, `Σ_j ‖x_j‖² Σ_i w_ij²` over its features:
    /// the sum of its squared scores by Wanda. The texts are run through the next block as it is stored.
    ///
    /// # Errors
    /// Those of [`Calibration::preview`]; those of [`Shrinking::by_magnitude`]; an activation that is not finite.
    pub fn by_inputs(&self, calibration: &Calibration<'_>) -> Result<PartScores> {
        let (block, config) = (calibration.block(), &self.opened.config);
        let mut norms = [Role::Out, Role::Down].map(|role| (self.names(block, role), None::<InputNorms>));
        let mut failed = None;
        calibration.preview(usize::MAX, &mut |seen, _| {
            let Some((_, norms)) = norms.iter_mut().find(|(names, _)| *names == seen.input.weights) else { return };
            let features = seen.x.len().checked_div(seen.tokens).unwrap_or_default();
            let norms = norms.get_or_insert_with(|| InputNorms::new(features));
            failed = failed.take().or(norms.add(seen.x).err());
        })?;
        if let Some(error) = failed {
            return Err(Error::from(error).in_layer(format!("the inputs of block {block}")));
        }
        let [out, down] = norms;
        let weighted = |role: Role, norms: Option<InputNorms>| -> Result<Vec<f64>> {
            let norms = norms
                .filter(|norms| norms.tokens() > 0)
                .ok_or(twofour::Error::NoTokens { what: "norms of input features" })?;
            let columns = self.columns(block, role)?;
            Ok(columns.iter().zip(norms.sums_of_squares()).map(|(column, norm)| column * norm).collect())
        };
        let (out, features) = (weighted(Role::Out, out.1)?, weighted(Role::Down, down.1)?);
        let heads: Vec<f64> = out.chunks(config.attention.head_dim).map(|head| head.iter().sum()).collect();
        let kv_heads = heads.chunks(self.group()).map(|heads| heads.iter().sum()).collect();
        Ok(PartScores { features, heads, kv_heads })
    }

    /// Returns what a block with these scores keeps: of every kind the parts with the highest scores, ties to the lower
    /// index; of the heads of queries only those whose keys and values are kept, as many for each of them.
    pub fn kept(&self, scores: &PartScores) -> KeptParts {
        let BlockSizes { features, heads, kv_heads } = self.sizes;
        let kept_kv = largest(&scores.kv_heads, kv_heads);
        let group = self.group();
        let kept_heads = kept_kv.iter().flat_map(|kv| {
            let first = kv * group;
            let own = scores.heads.get(first..first + group).unwrap_or_default();
            largest(own, heads / kv_heads.max(1)).into_iter().map(move |head| first + head)
        });
        let heads = kept_heads.collect();
        KeptParts { features: largest(&scores.features, features), heads, kv_heads: kept_kv }
    }

    /// The model with what each block keeps, and with the `config.json` of it.
    ///
    /// # Errors
    /// Where `kept` has not every block, or not as many parts of each as [`Shrinking::after`]; a configuration that
    /// would not be read as what it was but for these sizes.
    pub fn shrunk(self, kept: &[KeptParts]) -> Result<Reader> {
        if kept.len() != self.blocks() {
            let (what, expected) = ("blocks of which something is kept", self.blocks());
            return Err(Error::length(what, expected, kept.len()));
        }
        let mut orders = HashMap::new();
        for (block, kept) in kept.iter().enumerate() {
            self.add_orders(block, kept, &mut orders)?;
        }
        let Shrinking { opened, fields, family, size_fields, sizes } = self;
        let mut expected = opened.config.clone();
        expected.feed_forward.hidden = sizes.features;
        (expected.attention.heads, expected.attention.kv_heads) = (sizes.heads, sizes.kv_heads);
        let text = config_text(&fields, &size_fields, &opened.config, sizes);
        let reader = opened.reader.reordered(&orders)?.with_beside(CONFIG_FILE, text.clone());
        // What is written is read back first: a family may have fields of its own that follow from these.
        let fields = Fields::parse(fields.path(), &text)?;
        let source = Source::new(family, &fields, &reader);
        let mut config = (family.config)(&source)?;
        config.validate().map_err(|error| fields.not_valid(&error))?;
        config.output = expected.output;
        if config != expected {
            let reason = "the shrunk model's configuration would change more than the sizes of its blocks".to_owned();
            return Err(CheckpointError::NotAConfig { path: fields.path().to_owned(), reason }.into());
        }
        let layout = (family.layout)(&source, &config)?;
        for (name, linear) in layout.linears {
            for (part, outputs) in linear.parts.iter().filter(|_| role_of(&name).is_some()) {
                let name = format!("{part}.weight");
                let (shape, found) = (linear.stored_shape(*outputs), reader.tensor(&name)?.info.shape.clone());
                if found != shape {
                    let path = reader.path().to_owned();
                    return Err(CheckpointError::Shape { path, name, expected: shape.to_vec(), found }.into());
                }
            }
        }
        Ok(reader)
    }

    /// Query heads that read the same keys and values.
    fn group(&self) -> usize {
        let attention = &self.opened.config.attention;
        attention.heads.checked_div(attention.kv_heads).unwrap_or(1).max(1)
    }

    fn stored(&self, block: usize, role: Role) -> Result<&StoredLinear> {
        let name = layer_name(block, role);
        self.opened.layout.linears.get(&name).ok_or(Error::NoSuchLayer { pattern: name, layers: vec![] })
    }

    fn names(&self, block: usize, role: Role) -> Vec<String> {
        self.opened.parts().weights_of(&layer_name(block, role))
    }

    /// A layer's weight as `[out, in]`: its columns, and its elements.
    fn weight(&self, block: usize, role: Role) -> Result<(usize, Vec<f32>)> {
        let (name, inputs) = (format!("{}.weight", layer_name(block, role)), self.stored(block, role)?.inputs);
        let weight = self.opened.parts().values(&name)?;
        let matrix = MatrixRef::new(weight.len().checked_div(inputs).unwrap_or_default(), inputs, &weight)?;
        matrix.expect_finite().map_err(|error| error.in_tensor(self.names(block, role).join(", ")))?;
        Ok((inputs, weight))
    }

    /// The sums of squares of a weight's rows.
    fn rows(&self, block: usize, role: Role) -> Result<Vec<f64>> {
        let (cols, weight) = self.weight(block, role)?;
        Ok(weight.chunks(cols.max(1)).map(|row| row.iter().map(|w| f64::from(*w).powi(2)).sum()).collect())
    }

    /// The sums of squares of a weight's columns.
    fn columns(&self, block: usize, role: Role) -> Result<Vec<f64>> {
        let (cols, weight) = self.weight(block, role)?;
        let mut sums = vec![0.0; cols];
        for row in weight.chunks(cols.max(1)) {
            sums.iter_mut().zip(row).for_each(|(sum, w)| *sum += f64::from(*w).powi(2));
        }
        Ok(sums)
    }

    fn add_orders(&self, block: usize, kept: &KeptParts, orders: &mut HashMap<String, Reorder>) -> Result<()> {
        let (before, after) = (self.before(), self.sizes);
        for (what, kept, expected) in [
            ("hidden features that are kept", &kept.features, after.features),
            ("heads that are kept", &kept.heads, after.heads),
            ("heads of keys and values that are kept", &kept.kv_heads, after.kv_heads),
        ] {
            if kept.len() != expected {
                return Err(Error::length(what, expected, kept.len()));
            }
        }
        let config = &self.opened.config;
        let d = config.attention.head_dim;
        if after.features < before.features {
            let copies = if config.feed_forward.gated { 2 } else { 1 };
            let outputs = (0..copies).flat_map(|copy| kept.features.iter().map(move |f| copy * before.features + f));
            self.keep_outputs(block, Role::Up, &outputs.collect::<Vec<_>>(), orders)?;
            self.keep_inputs(block, Role::Down, &kept.features, orders)?;
        }
        if after.heads < before.heads {
            let runs = |heads: &[usize], first: usize| -> Vec<usize> {
                heads.iter().flat_map(|head| (0..d).map(move |feature| first + head * d + feature)).collect()
            };
            let (queries, keys) = (config.query_width(), config.kv_width());
            let inputs = runs(&kept.heads, 0);
            let outputs =
                [inputs.clone(), runs(&kept.kv_heads, queries), runs(&kept.kv_heads, queries + keys)].concat();
            self.keep_outputs(block, Role::Qkv, &outputs, orders)?;
            self.keep_inputs(block, Role::Out, &inputs, orders)?;
        }
        Ok(())
    }

    /// Keeps some outputs of a layer, in ascending order: rows of its weights and elements of its biases.
    fn keep_outputs(
        &self,
        block: usize,
        role: Role,
        kept: &[usize],
        orders: &mut HashMap<String, Reorder>,
    ) -> Result<()> {
        let linear = self.stored(block, role)?;
        let mut first = 0;
        for (name, outputs) in &linear.parts {
            let range = first..first + outputs;
            first = range.end;
            let own: Vec<usize> =
                kept.iter().filter(|output| range.contains(output)).map(|output| output - range.start).collect();
            if linear.has_bias {
                orders.insert(format!("{name}.bias"), Reorder::kept_rows(*outputs, own.clone())?);
            }
            let reorder = match linear.is_transposed {
                true => Reorder::kept_columns(*outputs, own)?,
                false => Reorder::kept_rows(*outputs, own)?,
            };
            orders.insert(format!("{name}.weight"), reorder);
        }
        Ok(())
    }

    /// Keeps some inputs of a layer: columns of its weights.
    fn keep_inputs(
        &self,
        block: usize,
        role: Role,
        kept: &[usize],
        orders: &mut HashMap<String, Reorder>,
    ) -> Result<()> {
        let linear = self.stored(block, role)?;
        for (name, _) in &linear.parts {
            let reorder = match linear.is_transposed {
                true => Reorder::kept_rows(linear.inputs, kept.to_vec())?,
                false => Reorder::kept_columns(linear.inputs, kept.to_vec())?,
            };
            orders.insert(format!("{name}.weight"), reorder);
        }
        Ok(())
    }
}

fn layer_name(block: usize, role: Role) -> String {
    format!("blocks.{block}.{}", role.name())
}

/// The role of a linear layer of a block, by its name.
fn role_of(name: &str) -> Option<Role> {
    Role::ALL.into_iter().find(|role| name.starts_with("blocks.") && name.ends_with(role.name()))
}

fn sizes_of(config: &TransformerConfig) -> BlockSizes {
    let attention = &config.attention;
    BlockSizes { features: config.feed_forward.hidden, heads: attention.heads, kv_heads: attention.kv_heads }
}

/// An error unless all weights of blocks are floats: integers have scales beside them, and compressed weights groups of
/// four columns.
fn expect_floats(opened: &Opened) -> Result<()> {
    let of_blocks = opened.layout.linears.iter().filter(|(name, _)| role_of(name).is_some());
    for (part, _) in of_blocks.flat_map(|(_, linear)| &linear.parts) {
        let name = format!("{part}.weight");
        let dtype = opened.reader.tensor(&name).ok().map(|view| view.info.dtype);
        let is_float = dtype.is_some_and(|dtype| dtype.element().is_some()) && !opened.reader.is_dense_int8(&name);
        if !is_float {
            let found = dtype.map_or("compressed".to_owned(), |dtype| dtype.to_string());
            return Err(CheckpointError::NotFloats { path: opened.reader.path().to_owned(), name, found }.into());
        }
    }
    Ok(())
}

fn expect_sizes(config: &TransformerConfig, fields: &SizeFields, after: BlockSizes) -> Result<()> {
    let before = sizes_of(config);
    let fault = |what, found: String, expected| Err(Error::Setting { what, found, expected });
    let of = |after: usize, before: usize| format!("{after} of {before}");
    if after == before {
        return fault("the sizes of the blocks", "what they are".to_owned(), "smaller; nothing would be removed");
    }
    if after.features == 0 || after.features > before.features {
        return fault("hidden features", of(after.features, before.features), "from 1 to the model's own number");
    }
    if after.kv_heads == 0 || after.kv_heads > before.kv_heads {
        let found = of(after.kv_heads, before.kv_heads);
        return fault("heads of keys and values", found, "from 1 to the model's own number");
    }
    if !after.heads.is_multiple_of(after.kv_heads) || after.heads == 0 {
        let found = format!("{} for {} heads of keys and values", after.heads, after.kv_heads);
        return fault("heads of queries", found, "a multiple of them: each is read by as many");
    }
    if after.heads / after.kv_heads > before.heads / before.kv_heads.max(1) {
        let found = format!(
            "{} for {} heads of keys and values, which the model has {} for each",
            after.heads,
            after.kv_heads,
            before.heads / before.kv_heads.max(1)
        );
        return fault("heads of queries", found, "at most as many for each of them");
    }
    if after.heads == before.heads {
        return Ok(());
    }
    if fields.heads.is_none() {
        return fault(
            "heads",
            of(after.heads, before.heads),
            "the model's own number: its config.json has no size of a head, which is the width by the number of heads",
        );
    }
    if fields.divides_width && !config.width.is_multiple_of(after.heads) {
        let found = format!("{} for a width of {}", after.heads, config.width);
        return fault("heads of queries", found, "a divisor of the width, as transformers requires for this family");
    }
    Ok(())
}

/// The indices of the largest values, in ascending order; ties to the lower index.
fn largest(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// The configuration with other sizes of blocks.
fn config_text(fields: &Fields, names: &SizeFields, before: &TransformerConfig, after: BlockSizes) -> Vec<u8> {
    let mut values = fields.values().clone();
    let mut set = |field: &str, size: usize| _ = values.insert(field.to_owned(), Value::from(size));
    set(names.features, after.features);
    if let Some([heads, kv_heads, head_dim]) = names.heads.filter(|_| after.heads != before.attention.heads) {
        set(heads, after.heads);
        set(kv_heads, after.kv_heads);
        set(head_dim, before.attention.head_dim);
    }
    // A Value with string keys always serialises; `{:#}` is its indented form.
    format!("{:#}\n", Value::Object(values)).into_bytes()
}
