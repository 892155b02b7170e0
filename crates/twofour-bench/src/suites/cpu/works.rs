//! The GEMMs that a suite of the CPU measures.

use anyhow::{Context, Result, bail};
use clap::Args;
use globset::Glob;
use twofour::DataType;
use twofour_cli::{
    dtype,
    exit::{Usage, UsageList},
    measure::{Shape, Work},
    weight_format::WeightFormat,
};

/// The two sides of a feed-forward block of an 8-billion-parameter model.
const DECODE_SHAPES: [Shape; 2] = [Shape { out: 14336, inputs: 4096 }, Shape { out: 4096, inputs: 14336 }];
const DECODE_TOKENS: [usize; 3] = [1, 4, 16];
/// The attention's output projection of the same model.
const PREFILL_SHAPE: Shape = Shape { out: 4096, inputs: 4096 };

/// Which GEMMs are measured.
#[derive(Debug, Args)]
pub(in crate::suites) struct WorkOptions {
    /// Measure only work whose name matches, as in `decode` or `prefill/bf16/**`
    #[arg(long, value_delimiter = ',', value_name = "GLOB")]
    only: Vec<String>,

    /// Dtypes of the weight; int4 is interleaved with 2:4 and dense int8 [default: f32,bf16,int8]
    #[arg(long, value_parser = dtype::on_cpu(), value_delimiter = ',', value_name = "LIST")]
    dtype: Vec<WeightFormat>,

    /// Measure layers of this shape instead of the suite's; may be repeated
    #[arg(long, value_name = "OUTxIN")]
    shape: Vec<Shape>,

    /// Numbers of tokens to multiply at once by the given shapes [default: 1,16,512; of the suite latency 1]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LIST",
        requires = "shape",
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    tokens: Vec<u32>,
}

impl WorkOptions {
    /// Returns what was asked for: of the given shapes, or of a suite for some dtypes.
    ///
    /// # Errors
    /// [`Usage`] for a pattern that matches nothing.
    pub(in crate::suites) fn works(
        &self,
        suite: fn(&[WeightFormat]) -> Vec<Work>,
        tokens: &[usize],
    ) -> Result<Vec<Work>> {
        let dtypes = if self.dtype.is_empty() { &DTYPES[..] } else { &self.dtype };
        let given: Vec<usize> = self.tokens.iter().map(|&tokens| tokens as usize).collect();
        let works = match (self.shape.as_slice(), given.as_slice()) {
            ([], _) => suite(dtypes),
            (shapes, []) => product(shapes, dtypes, tokens),
            (shapes, tokens) => product(shapes, dtypes, tokens),
        };
        only(works, &self.only)
    }

    /// Returns the options as one would type them again, each behind a space.
    pub(in crate::suites) fn told(&self) -> String {
        fn list<T: ToString>(list: &[T]) -> String {
            list.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
        }
        let mut told = String::new();
        let mut add = |option: &str, value: String| {
            if !value.is_empty() {
                told += &format!(" {option} {value}");
            }
        };
        self.only.iter().for_each(|pattern| add("--only", format!("'{pattern}'")));
        add("--dtype", list(&self.dtype));
        self.shape.iter().for_each(|shape| add("--shape", shape.to_string()));
        add("--tokens", list(&self.tokens));
        told
    }
}

/// The default dtypes.
const DTYPES: [WeightFormat; 3] =
    [WeightFormat::Plain(DataType::F32), WeightFormat::Plain(DataType::BF16), WeightFormat::Plain(DataType::I8)];

/// Returns the suite for some dtypes: decode by shape and dtype, so that neighbours share a weight, then prefill.
pub(super) fn suite(dtypes: &[WeightFormat]) -> Vec<Work> {
    let decode = product(&DECODE_SHAPES, dtypes, &DECODE_TOKENS);
    let prefill = dtypes.iter().flat_map(|&dtype| {
        let tokens: &[usize] = if dtype == DataType::F32.into() { &[512, 2048] } else { &[512] };
        product(&[PREFILL_SHAPE], &[dtype], tokens)
    });
    decode.into_iter().chain(prefill).collect()
}

/// Returns every shape with every dtype and number of tokens.
pub(in crate::suites) fn product(shapes: &[Shape], dtypes: &[WeightFormat], tokens: &[usize]) -> Vec<Work> {
    let mut works = Vec::with_capacity(shapes.len() * dtypes.len() * tokens.len());
    for &dtype in dtypes {
        for &shape in shapes {
            works.extend(tokens.iter().map(|&tokens| Work { shape, dtype, tokens }));
        }
    }
    works
}

/// Keeps the work that one of the patterns matches; without patterns, all. A pattern without a slash matches every name
/// that begins with it.
fn only(works: Vec<Work>, patterns: &[String]) -> Result<Vec<Work>> {
    if patterns.is_empty() {
        return Ok(works);
    }
    let mut kept = vec![false; works.len()];
    for pattern in patterns {
        let whole = if pattern.contains('/') { pattern.clone() } else { format!("{pattern}/**") };
        let glob = match Glob::new(&whole) {
            Ok(glob) => glob.compile_matcher(),
            Err(e) => return Err(e).context(Usage(format!("--only {pattern}: not a pattern"))),
        };
        let mut matches = 0;
        for (work, kept) in works.iter().zip(&mut kept) {
            if glob.is_match(work.to_string()) {
                (*kept, matches) = (true, matches + 1);
            }
        }
        tracing::debug!(pattern, matches, "chosen");
        if matches == 0 {
            let heading = format!("--only {pattern} matches nothing; there are");
            bail!(UsageList { heading, items: works.iter().map(ToString::to_string).collect() });
        }
    }
    Ok(works.into_iter().zip(kept).filter_map(|(work, kept)| kept.then_some(work)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(works: &[Work]) -> Vec<String> {
        works.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_suite_has_what_the_documents_promise() {
        let names = names(&suite(&DTYPES));
        assert_eq!(names.len(), 3 * 2 * 3 + 4);
        for wanted in ["decode/i8/4096x14336/1", "prefill/f32/4096x4096/2048", "prefill/bf16/4096x4096/512"] {
            assert!(names.iter().any(|name| name == wanted), "{wanted}");
        }
    }

    #[test]
    fn patterns_choose() {
        let chosen =
            |patterns: &[&str]| only(suite(&DTYPES), &patterns.iter().map(|p| p.to_string()).collect::<Vec<_>>());
        assert_eq!(chosen(&[]).unwrap().len(), 22);
        assert_eq!(chosen(&["prefill"]).unwrap().len(), 4);
        assert_eq!(
            names(&chosen(&["decode/f32/*/1", "prefill/i8/**"]).unwrap()),
            ["decode/f32/14336x4096/1", "decode/f32/4096x14336/1", "prefill/i8/4096x4096/512"]
        );
        let error = chosen(&["decode", "nonsense"]).unwrap_err();
        let list = error.downcast_ref::<UsageList>().unwrap();
        assert!(list.items.contains(&"decode/f32/14336x4096/1".to_owned()), "{list:?}");
        assert!(chosen(&["[/"]).unwrap_err().is::<Usage>());
    }
}
