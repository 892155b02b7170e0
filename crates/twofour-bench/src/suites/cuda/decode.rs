//! The suite `decode`.

use anyhow::Result;
use clap::Args;
use twofour_cli::present::table::Table;
use twofour_cuda::{DataType, cache::Cache, compare::Dispatcher};

use super::{
    gemm::{GemmRow, Gemms, RandomLayer},
    shapes::ProductOptions,
    suite::{Bench, Suite},
};

/// `[out_features, in_features]`: the layers of Llama 3 8B.
const LAYERS: [[usize; 2]; 4] = [[6144, 4096], [4096, 4096], [28672, 4096], [4096, 14336]];

/// Token counts.
const TOKENS: [usize; 5] = [1, 8, 16, 32, 64];

const TYPES: [DataType; 3] = [DataType::BF16, DataType::E4M3, DataType::I8];

/// Measure memory-bound GEMMs of small batches with a 2:4 weight
///
/// Ours, cuSPARSELt's and cuBLASLt's, beside a kernel that reads the 2:4 weight's bytes and does nothing else; in bf16
/// also with an int4 weight with a scale for every 128 columns, and a read of its bytes.
#[derive(Debug, Args)]
#[command(after_help = "Example: twofour-bench cuda decode --shape 4096x4096 --tokens 1,16 -o decode.json")]
pub(crate) struct Decode {
    #[command(flatten)]
    products: ProductOptions,
}

impl Suite for Decode {
    const NAME: &'static str = "decode";
    const NOTE: &'static str = Gemms::NOTE;
    const HAS_LIBRARIES: bool = true;
    type Row = GemmRow;

    fn measure(&self, bench: &mut Bench<'_>) -> Result<Vec<GemmRow>> {
        // Results of other runs are not used.
        let forgetful = tempfile::tempdir()?;
        let dispatcher = Dispatcher::with_cache(bench.device, &Cache::at(forgetful.path()));
        let (layers, counts) = (self.products.weights(&LAYERS), self.products.tokens(&TOKENS));
        let works: Vec<_> = TYPES.iter().flat_map(|t| layers.iter().map(move |s| (*t, *s))).collect();
        let mut rows = Vec::new();
        for (done, (element, layer)) in works.iter().enumerate() {
            bench.begin(&format!("{element} [{}, {}]", layer[0], layer[1]), done, works.len());
            let layer = RandomLayer::new(bench.device, &dispatcher, *element, *layer)?;
            let layer = if *element == DataType::BF16 { layer.with_int4()? } else { layer };
            for tokens in &counts {
                rows.extend(layer.measure(*tokens, bench.rounds)?);
            }
        }
        Ok(rows)
    }

    fn table(rows: &[GemmRow]) -> Table {
        Gemms::table(rows)
    }

    fn told(&self) -> String {
        self.products.told()
    }
}
