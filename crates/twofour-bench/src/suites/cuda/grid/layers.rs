//! The weights and token counts of the grid.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use twofour_cuda::{
    DataType,
    problem::{EpilogueKind, GemmProblem},
};

/// A weight, and the layers of models that have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GridLayer {
    /// Rows of the weight.
    pub(crate) out: usize,
    /// Columns of the weight.
    pub(crate) inputs: usize,
    /// As in `Llama 3 8B qkv`.
    pub(crate) names: Vec<String>,
}

impl GridLayer {
    /// Elements of the weight.
    pub(crate) fn elements(&self) -> usize {
        self.out * self.inputs
    }
}

/// The projections of a model's blocks.
enum Block {
    /// Attention with as many heads for keys and values as for queries, and a feed-forward network of two layers:
    /// features of the model and between those two.
    Plain { model: usize, hidden: usize },
    /// Grouped-query attention and a gated feed-forward network: features of the model, of keys, and of the gate.
    Gated { model: usize, keys: usize, hidden: usize },
    /// A gated feed-forward network alone.
    Expert { model: usize, hidden: usize },
}

/// The models of the grid.
const MODELS: [(&str, Block); 13] = [
    ("GPT-2 small", Block::Plain { model: 768, hidden: 3072 }),
    ("GPT-2 medium", Block::Plain { model: 1024, hidden: 4096 }),
    ("GPT-2 large", Block::Plain { model: 1280, hidden: 5120 }),
    ("GPT-2 XL", Block::Plain { model: 1600, hidden: 6400 }),
    ("BERT-L", Block::Plain { model: 1024, hidden: 4096 }),
    ("ViT-B", Block::Plain { model: 768, hidden: 3072 }),
    ("ViT-L", Block::Plain { model: 1024, hidden: 4096 }),
    ("ViT-H", Block::Plain { model: 1280, hidden: 5120 }),
    ("Llama 3.2 1B", Block::Gated { model: 2048, keys: 512, hidden: 8192 }),
    ("Llama 3 8B", Block::Gated { model: 4096, keys: 1024, hidden: 14336 }),
    ("Llama 3 70B", Block::Gated { model: 8192, keys: 1024, hidden: 28672 }),
    ("Qwen 2.5 7B", Block::Gated { model: 3584, keys: 512, hidden: 18944 }),
    ("Mixtral 8x7B expert", Block::Expert { model: 4096, hidden: 14336 }),
];

/// The weight of PyTorch's tutorial on semi-structured sparsity.
const TUTORIAL: (&str, [usize; 2]) = ("PyTorch tutorial", [3072, 10240]);

impl Block {
    /// Returns each layer's name and weight `[out, in]`: fused as in inference servers, and each by itself.
    fn layers(&self) -> Vec<(&'static str, [usize; 2])> {
        match *self {
            Block::Plain { model, hidden } => vec![
                ("qkv", [3 * model, model]),
                ("q, k, v, o", [model, model]),
                ("up", [hidden, model]),
                ("down", [model, hidden]),
            ],
            Block::Gated { model, keys, hidden } => {
                let attention = [("qkv", [model + 2 * keys, model]), ("q, o", [model, model]), ("k, v", [keys, model])];
                attention.into_iter().chain(Block::Expert { model, hidden }.layers()).collect()
            }
            Block::Expert { model, hidden } => {
                vec![("gate+up", [2 * hidden, model]), ("gate, up", [hidden, model]), ("down", [model, hidden])]
            }
        }
    }
}

/// Returns the distinct weights of the models, the largest first.
pub(crate) fn grid_layers() -> Vec<GridLayer> {
    let of_models = MODELS.iter().flat_map(|(model, block)| {
        block.layers().into_iter().map(move |(layer, weight)| (format!("{model} {layer}"), weight))
    });
    GridLayer::distinct(of_models.chain([(TUTORIAL.0.to_owned(), TUTORIAL.1)]))
}

impl GridLayer {
    /// Joins layers with the same weight, the largest first. Empty names are skipped.
    pub(crate) fn distinct(layers: impl IntoIterator<Item = (String, [usize; 2])>) -> Vec<Self> {
        let mut distinct: Vec<Self> = Vec::new();
        for (name, [out, inputs]) in layers {
            let place = distinct.iter().position(|layer| (layer.out, layer.inputs) == (out, inputs));
            let place = place.unwrap_or_else(|| {
                distinct.push(Self { out, inputs, names: Vec::new() });
                distinct.len() - 1
            });
            let names = &mut distinct[place].names;
            if !name.is_empty() && !names.contains(&name) {
                names.push(name);
            }
        }
        distinct.sort_by_key(|layer| (std::cmp::Reverse(layer.elements()), std::cmp::Reverse(layer.out)));
        distinct
    }
}

/// Token counts in bf16: the powers of two, and sequence lengths of CLIP (77, 257), ViT (197, 577) and Whisper (1500).
const TOKENS: [usize; 21] =
    [1, 2, 4, 8, 16, 32, 64, 77, 128, 197, 256, 257, 512, 577, 1024, 1500, 2048, 4096, 5000, 8192, 16384];

/// Token counts in the other data types.
const FEWER_TOKENS: [usize; 11] = [1, 16, 64, 96, 128, 192, 257, 512, 1024, 2048, 8192];

/// Data types of W and X, and the token counts of each.
const TYPES: [(DataType, &[usize]); 4] = [
    (DataType::BF16, &TOKENS),
    (DataType::E4M3, &FEWER_TOKENS),
    (DataType::I8, &FEWER_TOKENS),
    (DataType::F16, &FEWER_TOKENS),
];

/// The epilogue of the GEMMs of a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum GridEpilogue {
    /// None: store the result
    #[default]
    None,
    /// Add a bias; cuBLASLt does it, too
    Bias,
    /// Add a bias and apply GELU; after cuBLASLt, which lacks it, a kernel does
    BiasGelu,
    /// Multiply by a scale of each feature and each token, as 8-bit layers do, and add a bias; after cuBLASLt a kernel
    /// does
    Scales,
}

impl GridEpilogue {
    /// Its name as the option has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            GridEpilogue::None => "none",
            GridEpilogue::Bias => "bias",
            GridEpilogue::BiasGelu => "bias-gelu",
            GridEpilogue::Scales => "scales",
        }
    }

    /// The epilogue of a problem.
    pub(crate) fn kind(self) -> Option<EpilogueKind> {
        match self {
            GridEpilogue::None => None,
            GridEpilogue::Bias => Some(EpilogueKind::Bias),
            GridEpilogue::BiasGelu => Some(EpilogueKind::Activation),
            GridEpilogue::Scales => Some(EpilogueKind::Scales),
        }
    }
}

/// A weight in a data type, with a number of tokens.
#[derive(Debug, Clone)]
pub(crate) struct GridCell<'a> {
    /// Data type of W and X.
    pub(crate) element: DataType,
    /// The weight.
    pub(crate) layer: &'a GridLayer,
    /// Tokens.
    pub(crate) tokens: usize,
    /// The most tokens that the grid has in this data type.
    pub(crate) most_tokens: usize,
    /// What the GEMM does with its sums.
    pub(crate) epilogue: GridEpilogue,
}

impl GridCell<'_> {
    /// Returns its GEMM.
    pub(crate) fn problem(&self, tokens: usize) -> GemmProblem {
        let output = if self.element.bytes() == 2 { self.element } else { DataType::BF16 };
        let plain = GemmProblem::plain(self.element, output, self.layer.out, tokens, self.layer.inputs);
        GemmProblem { epilogue: self.epilogue.kind(), ..plain }
    }

    /// Returns tokens, input features, output features.
    pub(crate) fn shape(&self) -> [usize; 3] {
        [self.tokens, self.layer.inputs, self.layer.out]
    }

    /// Returns whether two cells have the same weight in the same data type.
    pub(crate) fn has_weight_of(&self, other: &Self) -> bool {
        self.element == other.element && self.layer == other.layer
    }
}

impl fmt::Display for GridCell<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}, {}], {} tokens", self.element, self.layer.out, self.layer.inputs, self.tokens)
    }
}

/// Returns the cells of some weights with an epilogue: by data type, then by weight.
pub(crate) fn grid_cells(layers: &[GridLayer], epilogue: GridEpilogue) -> Vec<GridCell<'_>> {
    let of = |(element, tokens): (DataType, &'static [usize])| {
        layers.iter().flat_map(move |layer| {
            let most_tokens = tokens.iter().copied().max().unwrap_or(1);
            tokens.iter().map(move |&tokens| GridCell { element, layer, tokens, most_tokens, epilogue })
        })
    };
    TYPES.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(layers: &[GridLayer], out: usize, inputs: usize) -> &GridLayer {
        layers.iter().find(|layer| (layer.out, layer.inputs) == (out, inputs)).expect("a weight of the grid")
    }

    #[test]
    fn weights_are_distinct_and_name_their_models() {
        let layers = grid_layers();
        assert_eq!(layers.len(), 40);
        assert!(layers.is_sorted_by(|a, b| a.elements() >= b.elements()));
        assert!(layers.iter().all(|layer| !layer.names.is_empty()));
        let shared = find(&layers, 28672, 4096);
        assert_eq!(shared.names, ["Llama 3 8B gate+up", "Mixtral 8x7B expert gate+up"]);
        assert_eq!(find(&layers, 3072, 10240).names, ["PyTorch tutorial"]);
        assert_eq!(find(&layers, 4608, 3584).names, ["Qwen 2.5 7B qkv"]);
        assert_eq!(find(&layers, 57344, 8192).names, ["Llama 3 70B gate+up"]);
        // 1024 by 4096 is a down projection in three models and keys and values in another.
        assert_eq!(find(&layers, 1024, 4096).names.len(), 4);
    }

    #[test]
    fn cells_have_every_token_count_in_order_of_the_weights() {
        let layers = grid_layers();
        let cells = grid_cells(&layers, GridEpilogue::None);
        assert_eq!(cells.len(), 40 * (21 + 3 * 11));
        let tokens = |element| cells.iter().filter(|cell| cell.element == element).count();
        assert_eq!([DataType::BF16, DataType::I8].map(tokens), [840, 440]);
        assert!(cells.chunk_by(GridCell::has_weight_of).all(|cells| cells.len() == 21 || cells.len() == 11));
        assert_eq!(cells.chunk_by(GridCell::has_weight_of).count(), 160);
        assert!(cells.iter().all(|cell| cell.tokens <= cell.most_tokens));
        for powers in (0..15).map(|power| 1 << power) {
            assert!(TOKENS.contains(&powers), "{powers}");
        }
    }
}
