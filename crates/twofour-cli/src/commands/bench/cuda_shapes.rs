//! The shapes that a suite of `twofour bench cuda` measures: its own, or those that were asked for.

use anyhow::{Result, bail};
use clap::Args;

use super::cuda::Suite;
use crate::{
    exit::Usage,
    measure::{Shape, cuda::StepModel},
};

/// Tokens that are multiplied at once by the given shapes, if none are named.
const TOKENS: [usize; 1] = [8192];

/// Shapes instead of a suite's own.
#[derive(Debug, Args)]
pub(super) struct ShapeOptions {
    /// Measure this weight instead of the suite's; may be repeated
    ///
    /// In the suites prune, gemm, decode, train-linear and layer the weight itself; in block and step a GPT of width IN with MLPs of OUT features, of 1 and of 36 layers
    #[arg(long, value_name = "OUTxIN")]
    shape: Vec<Shape>,

    /// Numbers of tokens to multiply at once by the given shapes [default: 8192; for decode 1,8,16,32,64]
    ///
    /// In the suites block and step as one sequence of up to 1024, or several of 1024.
    #[arg(long, value_delimiter = ',', value_name = "LIST", requires = "shape", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: Vec<u32>,
}

impl ShapeOptions {
    /// Fails where a suite measures no such shapes.
    pub(super) fn expect_of(&self, suite: Suite) -> Result<()> {
        let name = suite.name();
        if matches!(suite, Suite::Attention | Suite::Generate | Suite::Overhead | Suite::Grid) && !self.shape.is_empty()
        {
            let instead = if suite == Suite::Grid { "; give it --shapes FILE" } else { "" };
            bail!(Usage(format!(
                "--shape is for --suite prune, gemm, decode, train-linear, layer, block and step, and this is {name}{instead}"
            )));
        }
        if suite == Suite::Prune && !self.tokens.is_empty() {
            bail!(Usage("--tokens: the suite prune multiplies with no tokens; leave them out".to_owned()));
        }
        Ok(())
    }

    /// The weights `[out, in]`.
    pub(super) fn weights(&self, of_suite: &[[usize; 2]]) -> Vec<[usize; 2]> {
        if self.shape.is_empty() {
            return of_suite.to_vec();
        }
        self.shape.iter().map(|shape| [shape.out, shape.inputs]).collect()
    }

    /// The numbers of tokens by which each of [`weights`](Self::weights) is multiplied.
    pub(super) fn tokens(&self, of_suite: &[usize]) -> Vec<usize> {
        if self.tokens.is_empty() {
            return of_suite.to_vec();
        }
        self.tokens.iter().map(|tokens| *tokens as usize).collect()
    }

    /// The products: tokens, input and output features.
    pub(super) fn products(&self, of_suite: &[[usize; 3]]) -> Vec<[usize; 3]> {
        if self.shape.is_empty() {
            return of_suite.to_vec();
        }
        let tokens = self.tokens(&TOKENS);
        let of_shape = |shape: &Shape| tokens.iter().map(|t| [*t, shape.inputs, shape.out]).collect::<Vec<_>>();
        self.shape.iter().flat_map(of_shape).collect()
    }

    /// The models of the suites `block` and `step`; none where no shapes are given.
    pub(super) fn models(&self, suite: Suite) -> Result<Vec<StepModel>> {
        let layers = if suite == Suite::Block { 1 } else { 36 };
        let mut models = vec![];
        for [tokens, inputs, outputs] in self.products(&[]) {
            let model = StepModel::gpt(layers, [outputs, inputs], tokens);
            models.push(model.map_err(|reason| Usage(format!("--suite {}: {reason}", suite.name())))?);
        }
        Ok(models)
    }

    /// The options as one would type them again.
    pub(super) fn told(&self) -> String {
        let mut told: String = self.shape.iter().map(|shape| format!(" --shape {shape}")).collect();
        if !self.tokens.is_empty() {
            let tokens: Vec<String> = self.tokens.iter().map(u32::to_string).collect();
            told += &format!(" --tokens {}", tokens.join(","));
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{ShapeOptions, Suite};

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: ShapeOptions,
    }

    fn options(line: &str) -> ShapeOptions {
        Line::try_parse_from(["x"].into_iter().chain(line.split_whitespace())).unwrap().options
    }

    #[test]
    fn shapes_and_tokens_replace_those_of_the_suite() {
        let given = options("--shape 96x64 --shape 8x4 --tokens 1,77");
        assert_eq!(given.products(&[[1, 2, 3]]), [[1, 64, 96], [77, 64, 96], [1, 4, 8], [77, 4, 8]]);
        assert_eq!(given.weights(&[[3, 2]]), [[96, 64], [8, 4]]);
        assert_eq!(given.told(), " --shape 96x64 --shape 8x4 --tokens 1,77");
        let none = options("");
        assert_eq!((none.products(&[[1, 2, 3]]), none.tokens(&[5])), (vec![[1, 2, 3]], vec![5]));
        assert!(none.models(Suite::Step).unwrap().is_empty() && none.told().is_empty());
        assert_eq!(options("--shape 96x64").products(&[]), [[8192, 64, 96]]);
        assert!(Line::try_parse_from(["x", "--tokens", "1"]).is_err());
    }

    #[test]
    fn suites_without_such_shapes_say_so() {
        let given = options("--shape 96x64 --tokens 1");
        assert!(given.expect_of(Suite::Attention).unwrap_err().to_string().contains("and this is attention"));
        assert!(given.expect_of(Suite::Grid).unwrap_err().to_string().contains("--shapes FILE"));
        assert!(given.expect_of(Suite::Prune).unwrap_err().to_string().contains("--tokens"));
        given.expect_of(Suite::Layer).unwrap();
        assert!(options("--shape 96x65").models(Suite::Block).unwrap_err().to_string().contains("65"));
        let models = options("--shape 512x128 --tokens 100,4096").models(Suite::Step).unwrap();
        assert_eq!(models.iter().map(|m| m.name()).collect::<Vec<_>>(), ["512x128, 1 x 100", "512x128, 4 x 1024"]);
        assert!(options("--shape 512x128 --tokens 1500").models(Suite::Step).unwrap_err().to_string().contains("1024"));
    }
}
