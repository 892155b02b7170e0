//! Weights and token counts instead of a suite's own.

use clap::Args;
use twofour_cli::measure::Shape;

/// Tokens that are multiplied at once by the given weights, if none are named.
const TOKENS: [usize; 1] = [8192];

/// The weights that are measured.
#[derive(Debug, Args)]
pub(crate) struct WeightOptions {
    /// Measure this weight instead of the suite's; may be repeated
    #[arg(long, value_name = "OUTxIN")]
    shape: Vec<Shape>,
}

impl WeightOptions {
    /// The weights `[out, in]`.
    pub(super) fn weights(&self, of_suite: &[[usize; 2]]) -> Vec<[usize; 2]> {
        if self.shape.is_empty() {
            return of_suite.to_vec();
        }
        self.shape.iter().map(|shape| [shape.out, shape.inputs]).collect()
    }

    /// The options as one would type them again.
    pub(super) fn told(&self) -> String {
        self.shape.iter().map(|shape| format!(" --shape {shape}")).collect()
    }
}

/// The weights that are measured, and by how many tokens each is multiplied.
#[derive(Debug, Args)]
pub(crate) struct ProductOptions {
    #[command(flatten)]
    weights: WeightOptions,

    /// Numbers of tokens to multiply at once by the given weights [default: 8192; for decode 1,8,16,32,64]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LIST",
        requires = "shape",
        value_parser = clap::value_parser!(u32).range(1..=1 << 20)
    )]
    tokens: Vec<u32>,
}

impl ProductOptions {
    /// The weights `[out, in]`.
    pub(super) fn weights(&self, of_suite: &[[usize; 2]]) -> Vec<[usize; 2]> {
        self.weights.weights(of_suite)
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
        let weights = self.weights.weights(&[]);
        if weights.is_empty() {
            return of_suite.to_vec();
        }
        let tokens = self.tokens(&TOKENS);
        weights.iter().flat_map(|[out, inputs]| tokens.iter().map(move |tokens| [*tokens, *inputs, *out])).collect()
    }

    /// The options as one would type them again.
    pub(super) fn told(&self) -> String {
        let mut told = self.weights.told();
        if !self.tokens.is_empty() {
            let tokens: Vec<String> = self.tokens.iter().map(u32::to_string).collect();
            told += &format!(" --tokens {}", tokens.join(","));
        }
        told
    }
}

/// A GEMM's shape, as in 4096 tokens, [14336, 4096].
pub(super) fn product([tokens, reduction, features]: [usize; 3]) -> String {
    format!("{tokens} tokens, [{features}, {reduction}]")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::ProductOptions;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: ProductOptions,
    }

    fn options(line: &str) -> ProductOptions {
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
        assert!(none.told().is_empty());
        assert_eq!(options("--shape 96x64").products(&[]), [[8192, 64, 96]]);
        assert!(Line::try_parse_from(["x", "--tokens", "1"]).is_err());
    }
}
