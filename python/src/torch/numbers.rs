//! What operators name by number ([`crate::names`]), as arguments of kernels.

use twofour::{
    estimate::Estimator,
    int4::{GROUP, Granularity},
    layer::{Activation, MaskRule},
};

use super::{
    failure::{Failure, Result},
    kernel::Number,
    scalar_type::ScalarType,
    tensor::{Device, Tensor},
};
use crate::names;

impl Number for i64 {
    fn of(number: i64) -> Result<Self> {
        Ok(number)
    }
}

/// A dimension.
impl Number for usize {
    fn of(number: i64) -> Result<Self> {
        usize::try_from(number).map_err(|_| negative(number))
    }
}

/// A count.
impl Number for u64 {
    fn of(number: i64) -> Result<Self> {
        u64::try_from(number).map_err(|_| negative(number))
    }
}

fn negative(number: i64) -> Failure {
    Failure::runtime(format!("sizes and counts must not be negative, and one is {number}"))
}

impl Number for Activation {
    fn of(number: i64) -> Result<Self> {
        named("activation", &names::ACTIVATIONS, number)
    }
}

impl Number for MaskRule {
    fn of(number: i64) -> Result<Self> {
        named("mask rule", &MaskRule::CHOOSING, number)
    }
}

/// Which estimator, without its seed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EstimatorKind(i64);

impl EstimatorKind {
    /// The estimator with a seed.
    ///
    /// # Errors
    /// A `RuntimeError` for a number without an estimator.
    pub(crate) fn with_seed(self, seed: i64) -> Result<Estimator> {
        named("estimator", &Estimator::all(seed as u64), self.0)
    }
}

impl Number for EstimatorKind {
    fn of(number: i64) -> Result<Self> {
        EstimatorKind(number).with_seed(0).map(|_| EstimatorKind(number))
    }
}

/// What shares a scale: 128 columns, or a row for -1.
impl Number for Granularity {
    fn of(number: i64) -> Result<Self> {
        // Groups of 64 columns are for files and the CPU layers of `twofour`: GPU kernels do not have them.
        names::granularity(number).filter(|granularity| *granularity != Granularity::Group64).ok_or_else(|| {
            Failure::runtime(format!(
                "group_size is {number}: an int4 weight has a scale for each {GROUP} columns of a row ({GROUP}) or for \
                 each row (-1)"
            ))
        })
    }
}

/// The type of floats of a result: torch's number of it, or that of an operand for -1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FloatType(Option<ScalarType>);

impl FloatType {
    /// The type, where an operand has that one.
    pub(crate) fn or(self, of_operand: ScalarType) -> ScalarType {
        self.0.unwrap_or(of_operand)
    }
}

impl Number for FloatType {
    fn of(number: i64) -> Result<Self> {
        if number == -1 {
            return Ok(FloatType(None));
        }
        ScalarType::of(number).map(|found| FloatType(Some(found))).ok_or_else(|| {
            let name = ScalarType::name_of(number);
            Failure::not_implemented(format!("{name} is not supported; use float32, bfloat16 or float16"))
        })
    }
}

fn named<T: Copy>(what: &str, all: &[T], number: i64) -> Result<T> {
    let found = usize::try_from(number).ok().and_then(|number| all.get(number));
    found.copied().ok_or_else(|| Failure::runtime(format!("there is no {what} number {number}")))
}

/// The number in a tensor of one int64; waits for a device that it is on.
///
/// # Errors
/// A `NotImplementedError` for another type, a `RuntimeError` for another number of elements.
pub(crate) fn seed(seed: &Tensor) -> Result<i64> {
    expect_seed(seed)?;
    let host = seed.copied_to(Device::HOST, "the seed")?;
    Ok(host.elements::<i64>("the seed", ScalarType::I64)?[0])
}

/// An error unless a tensor is one int64.
///
/// # Errors
/// Those of [`seed`].
pub(crate) fn expect_seed(seed: &Tensor) -> Result<()> {
    match (seed.dtype()?, seed.numel()) {
        (ScalarType::I64, 1) => Ok(()),
        (ScalarType::I64, len) => Err(Failure::runtime(format!("the seed must be one number, not {len}"))),
        (found, _) => Err(Failure::not_implemented(format!("the seed has dtype {}; int64 is required", found.name()))),
    }
}
