//! Contenders: this project's 2:4 and dense kernels, and the `gemm` crate.

mod float;
mod gemm;
mod int4;
mod int8;
mod own;

use std::fmt;

use anyhow::Result;
use half::{bf16, f16};
use twofour::DataType;

pub use self::int4::random_int4;
use self::{float::FloatWeights, int4::Int4Weights, int8::Int8Weights};
use super::work::{Shape, Who};
use crate::{dtype, weight_format::WeightFormat};

/// A GEMM implementation, with copies of the weight that calls rotate through.
pub(crate) trait Contender: fmt::Debug {
    /// The implementation's name.
    fn who(&self) -> Who;
    /// Bytes of one copy of the weight.
    fn weight_bytes(&self) -> usize;
    /// Multiplies once, with the next copy of the weight.
    fn multiply(&mut self) -> Result<()>;
    /// Returns the last result, `[tokens, out]`.
    fn product(&self) -> Result<Vec<f32>>;
}

/// A random weight in the forms of all contenders.
pub(crate) trait Weights: fmt::Debug {
    /// Returns the contenders for a number of tokens, [`Who::Sparse`] first; all multiply the same tokens.
    fn contenders(&self, tokens: usize) -> Result<Vec<Box<dyn Contender>>>;
    /// Bytes of the dense weight.
    fn dense_bytes(&self) -> usize;
    /// Bytes of the 2:4 weight: values and metadata.
    fn sparse_bytes(&self) -> usize;
}

/// Returns a random weight.
pub(crate) fn weights(shape: Shape, format: WeightFormat) -> Result<Box<dyn Weights>> {
    Ok(match format {
        WeightFormat::Plain(DataType::F32) => Box::new(FloatWeights::<f32>::new(shape)?),
        WeightFormat::Plain(DataType::BF16) => Box::new(FloatWeights::<bf16>::new(shape)?),
        WeightFormat::Plain(DataType::F16) => Box::new(FloatWeights::<f16>::new(shape)?),
        WeightFormat::Plain(DataType::I8) => Box::new(Int8Weights::new(shape)?),
        WeightFormat::Int4 => Box::new(Int4Weights::new(shape)?),
        other => return Err(dtype::not_on_cpu(other)),
    })
}

/// Returns the 2:4 kernel in f32, to be interleaved with the contenders of another dtype.
pub(crate) fn single(shape: Shape, tokens: usize) -> Result<Box<dyn Contender>> {
    Ok(Box::new(float::single(shape, tokens)?))
}

/// Two dense baselines have different results, so their times are not comparable.
#[derive(Debug, thiserror::Error)]
#[error(
    "{who} computes {found} where {reference} computes {expected} (output {at}): results differ, so times are not \
     compared"
)]
pub(crate) struct Disagreement {
    who: Who,
    reference: Who,
    at: usize,
    found: f32,
    expected: f32,
}

/// Checks that the dense baselines' last results agree, within the precision of their dtype.
///
/// # Errors
/// [`Disagreement`] with the first output that differs.
pub(crate) fn expect_agreement(contenders: &[Box<dyn Contender>], inputs: usize) -> Result<()> {
    // A dot product of `inputs` numbers from -1 to 1 is sqrt(inputs) / 3 in the mean; bf16 keeps 8 bits of it.
    let tolerance = 0.02 * (inputs as f32).sqrt();
    let mut dense = contenders.iter().filter(|contender| contender.who().is_dense());
    let Some(first) = dense.next() else { return Ok(()) };
    let reference = first.product()?;
    for other in dense {
        for (at, (found, expected)) in other.product()?.into_iter().zip(&reference).enumerate() {
            let difference = (found - expected).abs();
            if difference.is_nan() || difference > tolerance {
                let (who, reference) = (other.who(), first.who());
                return Err(Disagreement { who, reference, at, found, expected: *expected }.into());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_appears_and_the_dense_ones_agree() {
        let shape = Shape { out: 48, inputs: 64 };
        for (dtype, count) in [
            (WeightFormat::Plain(DataType::F32), 3),
            (WeightFormat::Plain(DataType::F16), 3),
            (WeightFormat::Plain(DataType::BF16), 2),
            (WeightFormat::Plain(DataType::I8), 2),
            (WeightFormat::Int4, 3),
        ] {
            let weights = weights(shape, dtype).unwrap();
            assert!(weights.dense_bytes() > weights.sparse_bytes());
            for tokens in [1, 3, 40] {
                let mut contenders = weights.contenders(tokens).unwrap();
                assert_eq!(contenders.len(), count, "{dtype}");
                assert_eq!(contenders[0].who(), Who::Sparse);
                for contender in &mut contenders {
                    contender.multiply().unwrap();
                    let product = contender.product().unwrap();
                    assert_eq!(product.len(), tokens * shape.out, "{dtype} {}", contender.who());
                    assert!(product.iter().any(|y| *y != 0.0), "{dtype} {}", contender.who());
                }
                expect_agreement(&contenders, shape.inputs).unwrap();
            }
        }
    }

    #[derive(Debug)]
    struct Fake(f32);

    impl Contender for Fake {
        fn who(&self) -> Who {
            if self.0 == 1.0 { Who::Dense } else { Who::Gemm }
        }
        fn weight_bytes(&self) -> usize {
            1
        }
        fn multiply(&mut self) -> Result<()> {
            Ok(())
        }
        fn product(&self) -> Result<Vec<f32>> {
            Ok(vec![1.0, self.0])
        }
    }

    #[test]
    fn a_wrong_product_is_not_compared() {
        for wrong in [2.0, f32::NAN] {
            let pair: [Box<dyn Contender>; 2] = [Box::new(Fake(1.0)), Box::new(Fake(wrong))];
            let error = expect_agreement(&pair, 4).unwrap_err().to_string();
            assert!(error.starts_with("gemm computes") && error.contains("output 1"), "{error}");
        }
    }
}
