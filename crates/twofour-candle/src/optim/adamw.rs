//! AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019) as one in-place operator for each
//! parameter.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
};

use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use serde::{Deserialize, Serialize};
use twofour_transformer::engine::{AdamWStep, PrunedDecay, SecondMoment};

use super::{
    moments::{self, Moments},
    update::Update,
};
#[cfg(feature = "cuda")]
use crate::cuda::adamw as cuda;
use crate::{Error, Result, float::for_float};

/// The names of the moments of a parameter in a saved state, after the parameter's own.
const MOMENTS: [&str; 2] = ["first_moment", "second_moment"];

/// The settings of [`AdamW`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdamWConfig {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay of the first moment, the running mean of the gradient.
    pub beta1: f64,
    /// Decay of the second moment, the running mean of its square.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Share of the parameter that each step takes off, times the learning rate.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    /// The defaults of candle and PyTorch: 1e-3, 0.9, 0.999, 1e-8, 0.01.
    fn default() -> Self {
        AdamWConfig { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 }
    }
}

/// AdamW over named parameters.
///
/// One pass over each parameter, its gradient and its two moments, in parallel on rayon's current pool or, with the
/// feature `cuda`, as one kernel on candle's stream. Moments are f32, whatever the parameter's dtype: f32, bf16 or f16.
/// From the same gradients a step has the same bits on a CPU, with any number of threads, and on a GPU.
#[derive(Debug)]
pub struct AdamW {
    parameters: Vec<Parameter>,
    config: AdamWConfig,
    steps: u64,
    #[cfg(feature = "cuda")]
    schedules: cuda::Schedules,
}

#[derive(Debug)]
struct Parameter {
    name: String,
    var: Var,
    weight_decay: f64,
    moments: Moments,
}

impl AdamW {
    /// An optimizer of the parameters, all with the weight decay of `config`.
    ///
    /// # Errors
    /// What [`AdamW::add`] refuses; [`Error::Setting`] for a setting out of range.
    pub fn new(parameters: impl IntoIterator<Item = (String, Var)>, config: AdamWConfig) -> Result<Self> {
        let share = 0.0..1.0;
        if !share.contains(&config.beta1) || !share.contains(&config.beta2) {
            let found = format!("{} and {}", config.beta1, config.beta2);
            return Err(Error::Setting { what: "the betas", found, expected: "from 0 up to, but not including, 1" });
        }
        expect_finite("the learning rate", config.learning_rate)?;
        expect_finite("epsilon", config.epsilon)?;
        let mut optimizer = AdamW {
            parameters: Vec::new(),
            config,
            steps: 0,
            #[cfg(feature = "cuda")]
            schedules: cuda::Schedules::default(),
        };
        optimizer.add(parameters, config.weight_decay)?;
        Ok(optimizer)
    }

    /// Adds parameters with a weight decay of their own: 0 for biases and norms, as is usual.
    ///
    /// # Errors
    /// A parameter that is neither on the CPU nor, with the feature `cuda`, on a GPU, or not f32, bf16 or f16; a name
    /// or a variable that is there already; a weight decay that is negative or not finite.
    pub fn add(&mut self, parameters: impl IntoIterator<Item = (String, Var)>, weight_decay: f64) -> Result<()> {
        expect_finite("the weight decay", weight_decay)?;
        let mut names: HashSet<_> = self.parameters.iter().map(|p| p.name.clone()).collect();
        let mut ids: HashSet<_> = self.parameters.iter().map(|p| p.var.id()).collect();
        for (name, var) in parameters {
            for_float!("a parameter", var.dtype(), T => { let _: Option<T> = None; Ok(()) })
                .map_err(|e| e.in_layer(&name))?;
            if !names.insert(name.clone()) || !ids.insert(var.id()) {
                let expected = "given once: a second time it would be stepped twice";
                return Err(Error::Setting { what: "parameter", found: name, expected });
            }
            let moments = Moments::new(&var).map_err(|e| e.in_layer(&name))?;
            self.parameters.push(Parameter { name, var, weight_decay, moments });
        }
        Ok(())
    }

    /// The learning rate.
    pub fn learning_rate(&self) -> f64 {
        self.config.learning_rate
    }

    /// Sets the learning rate of the steps to come.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.config.learning_rate = learning_rate;
    }

    /// How many steps there were.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The norm of all gradients taken as one vector, summed in f64. On a GPU the sum is taken in another order, its
    /// root is rounded to f32, and the call waits for it.
    ///
    /// # Errors
    /// [`Error::MissingGradient`], and [`Error::NonFiniteGradient`] with the first parameter whose gradient holds an
    /// infinity or a NaN.
    pub fn gradient_norm(&self, gradients: &GradStore) -> Result<f64> {
        let pairs = self.pair(gradients)?;
        let sum = moments::sum_of_squares(&pairs.iter().map(|(_, gradient)| *gradient).collect::<Vec<_>>())?;
        if sum.is_finite() {
            return Ok(sum.sqrt());
        }
        for (parameter, gradient) in pairs {
            if !moments::sum_of_squares(&[gradient])?.is_finite() {
                return Err(Error::NonFiniteGradient { parameter: parameter.name.clone() });
            }
        }
        // Each is finite, and their sum overflows.
        Ok(sum.sqrt())
    }

    /// One step along the gradients as they are.
    ///
    /// # Errors
    /// [`Error::MissingGradient`] where a parameter has none; [`Error::Shape`] or [`Error::DType`] for a gradient that
    /// does not fit. Nothing is updated then.
    pub fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.step_scaled(gradients, 1.0)
    }

    /// One step along the gradients, scaled down so that their global norm is at most `max_norm`. Returns the norm they
    /// had. The gradients are read twice and not written.
    ///
    /// # Errors
    /// As [`AdamW::step`]; [`Error::NonFiniteGradient`] where a gradient holds an infinity or a NaN: nothing is
    /// updated, and training may go on with the next batch. [`Error::Setting`] for a `max_norm` that is not positive.
    pub fn step_clipped(&mut self, gradients: &GradStore, max_norm: f64) -> Result<f64> {
        if max_norm.is_nan() || max_norm <= 0.0 {
            let expected = "a number above 0; infinity does not clip";
            return Err(Error::Setting { what: "the largest gradient norm", found: max_norm.to_string(), expected });
        }
        let norm = self.gradient_norm(gradients)?;
        self.step_scaled(gradients, if norm > max_norm { max_norm / norm } else { 1.0 })?;
        Ok(norm)
    }

    fn step_scaled(&mut self, gradients: &GradStore, scale: f64) -> Result<()> {
        self.pair(gradients)?;
        let steps = self.steps + 1;
        let AdamWConfig { learning_rate, beta1, beta2, epsilon, .. } = self.config;
        for Parameter { var, weight_decay, moments, .. } in &mut self.parameters {
            let Some(gradient) = gradients.get(var) else { continue };
            let step = AdamWStep {
                learning_rate,
                beta1,
                beta2,
                epsilon,
                weight_decay: *weight_decay,
                step: steps,
                gradient_scale: scale as f32,
                second_moment: SecondMoment::Moving,
                pruned_decay: PrunedDecay::None,
            };
            match moments {
                Moments::Host(moments) => {
                    var.inplace_op2(&gradient.contiguous()?, &Update { step, moments: Mutex::new(moments) })?;
                }
                #[cfg(feature = "cuda")]
                Moments::Cuda(moments) => self.schedules.step(var, gradient, moments, &step)?,
            }
        }
        self.steps = steps;
        Ok(())
    }

    /// Each parameter with its gradient, after checking that all can be used.
    fn pair<'a>(&'a self, gradients: &'a GradStore) -> Result<Vec<(&'a Parameter, &'a Tensor)>> {
        let missing: Vec<_> = self.parameters.iter().filter(|p| gradients.get(&p.var).is_none()).collect();
        if !missing.is_empty() {
            return Err(Error::MissingGradient { parameters: missing.iter().map(|p| p.name.clone()).collect() });
        }
        let pairs = self.parameters.iter().filter_map(|p| Some((p, gradients.get(&p.var)?)));
        pairs
            .map(|(p, g)| {
                if g.dims() != p.var.dims() {
                    let expected = format!("{:?}", p.var.dims());
                    let error = Error::Shape { what: "its gradient", found: g.dims().to_vec(), expected };
                    return Err(error.in_layer(&p.name));
                }
                if g.dtype() != p.var.dtype() {
                    let expected = format!("{:?}", p.var.dtype());
                    return Err(Error::DType { what: "its gradient", found: g.dtype(), expected }.in_layer(&p.name));
                }
                Ok((p, g))
            })
            .collect()
    }

    /// The moments and the count of steps as tensors on the CPU: `name.first_moment`, `name.second_moment` (f32, of the
    /// parameter's shape) and `steps` (i64, `[1]`). With the parameters and the settings they are all that exact
    /// resuming needs.
    ///
    /// # Errors
    /// candle's own.
    pub fn state(&self) -> Result<HashMap<String, Tensor>> {
        let mut tensors = HashMap::new();
        for p in &self.parameters {
            for (key, moment) in MOMENTS.into_iter().zip(p.moments.to_host()?) {
                tensors.insert(format!("{}.{key}", p.name), Tensor::from_vec(moment, p.var.shape(), &Device::Cpu)?);
            }
        }
        tensors.insert("steps".to_owned(), Tensor::from_vec(vec![self.steps as i64], 1, &Device::Cpu)?);
        Ok(tensors)
    }

    /// Puts back what [`AdamW::state`] gave; `tensors` may hold others besides.
    ///
    /// # Errors
    /// [`Error::State`] where a tensor is missing or does not fit; nothing is changed then.
    pub fn load_state(&mut self, tensors: &HashMap<String, Tensor>) -> Result<()> {
        let find = |key: String, dtype: DType, shape: &[usize]| match tensors.get(&key) {
            None => Err(Error::State { reason: format!("there is no `{key}`") }),
            Some(t) if t.dtype() != dtype || t.dims() != shape => {
                let reason = format!("`{key}` is {:?} {:?}, not {dtype:?} {shape:?}", t.dtype(), t.dims());
                Err(Error::State { reason })
            }
            Some(t) => Ok(t.flatten_all()?),
        };
        let steps = find("steps".to_owned(), DType::I64, &[1])?.to_vec1::<i64>()?[0];
        let steps = u64::try_from(steps)
            .map_err(|_| Error::State { reason: format!("`steps` is {steps}, a negative count") })?;
        let moment = |p: &Parameter, key: &str| {
            Ok::<_, Error>(find(format!("{}.{key}", p.name), DType::F32, p.var.dims())?.to_vec1::<f32>()?)
        };
        let moments: Vec<_> = self
            .parameters
            .iter()
            .map(|p| Ok([moment(p, MOMENTS[0])?, moment(p, MOMENTS[1])?]))
            .collect::<Result<_>>()?;
        for (p, moments) in self.parameters.iter_mut().zip(moments) {
            p.moments.write(moments)?;
        }
        self.steps = steps;
        Ok(())
    }
}

/// For code that is generic over candle's optimizers. Parameters are named by their position; every one must get a
/// gradient.
impl candle_nn::Optimizer for AdamW {
    type Config = AdamWConfig;

    fn new(vars: Vec<Var>, config: AdamWConfig) -> candle_core::Result<Self> {
        Ok(AdamW::new(vars.into_iter().enumerate().map(|(index, var)| (index.to_string(), var)), config)?)
    }

    fn step(&mut self, gradients: &GradStore) -> candle_core::Result<()> {
        Ok(AdamW::step(self, gradients)?)
    }

    fn learning_rate(&self) -> f64 {
        AdamW::learning_rate(self)
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        AdamW::set_learning_rate(self, learning_rate);
    }
}

/// An error unless the setting is a finite number from 0 up.
fn expect_finite(what: &'static str, value: f64) -> Result<()> {
    if value >= 0.0 && value.is_finite() {
        Ok(())
    } else {
        Err(Error::Setting { what, found: value.to_string(), expected: "a finite number from 0 up" })
    }
}
