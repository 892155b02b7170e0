//! The kernels' functions of hidden layers.

use twofour_cuda::{Activation, raw::elementwise::ElementFunction};

use crate::{Error, Result, cuda::Gate, engine::Nonlinearity};

/// A hidden layer's function.
pub fn element_function(of: Nonlinearity) -> ElementFunction {
    match of {
        Nonlinearity::Relu => ElementFunction::Activation(Activation::Relu),
        Nonlinearity::Gelu => ElementFunction::Activation(Activation::Gelu),
        Nonlinearity::Silu => ElementFunction::Activation(Activation::Silu),
        Nonlinearity::TanhGelu => ElementFunction::TanhGelu,
        Nonlinearity::SquaredRelu => ElementFunction::SquaredRelu,
    }
}

/// A gate's function.
///
/// # Errors
/// [`Error::Unsupported`] for squared ReLU.
pub fn gate(of: Nonlinearity) -> Result<Gate> {
    Ok(match of {
        Nonlinearity::Silu => Gate::Silu,
        Nonlinearity::Gelu => Gate::Gelu,
        Nonlinearity::TanhGelu => Gate::TanhGelu,
        Nonlinearity::Relu => Gate::Relu,
        Nonlinearity::SquaredRelu => {
            let (engine, what) = ("cuda", "squared ReLU with a gate".to_owned());
            let remedy = "leave out the gate, or compute on the CPU";
            return Err(Error::Unsupported { engine, what, remedy });
        }
    })
}
