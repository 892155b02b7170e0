//! Random operands of a problem, on which engines are compared.

use std::{
    collections::HashSet,
    mem::discriminant,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};

use super::{
    Contender, Engine, Libraries, Measured, Product, RandomWeight, Time, Timer, Weight, epilogue::EpilogueTensors,
    random,
};
use crate::{
    Device, Error, Result, Stream,
    arguments::expect_dimension,
    problem::GemmProblem,
    raw::{Packed, gemm::Epilogue},
};

/// Random tensors in device memory for one weight and up to a largest number of tokens: trials of several token counts
/// share them.
#[derive(Debug)]
pub struct TrialTensors {
    stream: Arc<CudaStream>,
    /// The problem with the most tokens.
    largest: GemmProblem,
    weight: Arc<RandomWeight>,
    x: CudaSlice<u8>,
    outs: [CudaSlice<u8>; 3],
    /// Where the problem has an epilogue.
    epilogue: Option<EpilogueTensors>,
}

/// A problem with random tensors, on which engines are compared.
#[derive(Debug)]
pub struct Trial {
    device: Device,
    libraries: Libraries,
    problem: GemmProblem,
    tensors: Arc<TrialTensors>,
}

pub(super) fn failed(error: cudarc::driver::DriverError) -> Error {
    Error::driver("comparing engines", error)
}

impl TrialTensors {
    /// Returns tensors for `largest`, the problem with the most tokens, with a weight of their own.
    ///
    /// # Errors
    /// [`Error::Product`], [`Error::MixedElements`] and [`Error::Dimension`] for a problem that no kernel supports;
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn random(stream: &Arc<CudaStream>, largest: GemmProblem) -> Result<Self> {
        let weight = RandomWeight::new(stream, largest.element, largest.features, largest.reduction)?;
        Self::with_weight(stream, largest, Arc::new(weight))
    }

    fn with_weight(stream: &Arc<CudaStream>, largest: GemmProblem, weight: Arc<RandomWeight>) -> Result<Self> {
        largest.expect_known()?;
        let GemmProblem { x_element, features, tokens, reduction, output, .. } = largest;
        let x = random(stream, x_element, tokens * reduction, 1)?;
        let out = || stream.alloc_zeros::<u8>(features * tokens * output.bytes()).map_err(failed);
        let outs = [out()?, out()?, out()?];
        let epilogue = largest.epilogue.map(|_| EpilogueTensors::random(stream, output, (features, tokens)));
        let epilogue = epilogue.transpose()?;
        Ok(Self { stream: stream.clone(), largest, weight, x, outs, epilogue })
    }
}

impl Trial {
    /// Returns a trial with a weight of its own.
    ///
    /// # Errors
    /// [`Error::Product`], [`Error::MixedElements`] and [`Error::Dimension`] for a problem that no kernel supports;
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn random(device: &Device, libraries: &Libraries, problem: GemmProblem) -> Result<Self> {
        let stream = device.context().new_stream().map_err(failed)?;
        let tensors = Arc::new(TrialTensors::random(&stream, problem)?);
        Self::with_tensors(device, libraries, &tensors, problem.tokens)
    }

    /// Returns a trial with a weight that was created for this stream, element type and shape.
    ///
    /// # Errors
    /// Those of [`Trial::random`].
    pub fn with_weight(
        device: &Device,
        libraries: &Libraries,
        problem: GemmProblem,
        stream: &Arc<CudaStream>,
        weight: Arc<RandomWeight>,
    ) -> Result<Self> {
        let tensors = Arc::new(TrialTensors::with_weight(stream, problem, weight)?);
        Self::with_tensors(device, libraries, &tensors, problem.tokens)
    }

    /// Returns a trial of the tensors' problem with `tokens` tokens. Trials that share tensors overwrite each other's
    /// results.
    ///
    /// # Errors
    /// [`Error::Dimension`] for no tokens, or more than the tensors have.
    pub fn with_tensors(
        device: &Device,
        libraries: &Libraries,
        tensors: &Arc<TrialTensors>,
        tokens: usize,
    ) -> Result<Self> {
        expect_dimension("tokens", tokens, tensors.largest.tokens)?;
        let problem = GemmProblem { tokens, ..tensors.largest };
        let (device, libraries, tensors) = (device.clone(), libraries.clone(), tensors.clone());
        Ok(Self { device, libraries, problem, tensors })
    }

    /// Returns the problem.
    pub fn problem(&self) -> GemmProblem {
        self.problem
    }

    /// Returns the stream of all launches.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.tensors.stream
    }

    /// Returns the weight.
    pub fn weight(&self) -> &RandomWeight {
        &self.tensors.weight
    }

    /// Returns the activations, `[tokens, reduction]`; with shared tensors more rows follow.
    pub fn x(&self) -> &CudaSlice<u8> {
        &self.tensors.x
    }

    /// Returns the buffer that an engine writes its result to; with shared tensors it is longer than the result.
    pub fn out(&self, engine: Engine) -> &CudaSlice<u8> {
        let [ours, sparse, dense] = &self.tensors.outs;
        match engine {
            Engine::TwoFour(_) => ours,
            Engine::CusparseLt(_) => sparse,
            Engine::CublasLt(_) => dense,
        }
    }

    /// Plans the GEMM with an engine.
    ///
    /// # Errors
    /// Those of [`Product::new`].
    pub fn product(&self, engine: Engine) -> Result<Product> {
        let (stream, weight) = (self.stream(), self.weight());
        let at = |memory: &CudaSlice<u8>| memory.device_ptr(stream).0;
        let packed = Packed { values: at(&weight.values), meta: at(&weight.meta) };
        let weight = Weight { dense: Some(at(&weight.dense)), packed: Some(packed) };
        // SAFETY: the weight is 2:4 and lives as long as the trial, which contenders borrow.
        unsafe { Product::new(&self.device, &self.libraries, stream, self.problem, engine, weight) }
    }

    /// Returns a planned GEMM as a contender of this trial.
    pub fn contender<'a>(&'a self, product: &'a Product) -> Contender<'a> {
        let stream = self.stream();
        let x = self.x().device_ptr(stream).0;
        let out = self.out(product.engine()).device_ptr(stream).0;
        let raw = Stream(stream.cu_stream());
        let given = self.problem.epilogue.zip(self.tensors.epilogue.as_ref());
        let epilogue =
            given.map_or(Epilogue::default(), |(kind, tensors)| tensors.of(kind, self.problem.order, stream));
        // SAFETY: all memory is the trial's, at least as long as the problem requires, and lives until the stream has
        // been waited for.
        let launch = move || unsafe { product.run_with(raw, x, out, epilogue) };
        Contender::new(product.engine().name(), product.kernel(), launch)
    }

    /// Returns the best of each engine that supports the problem, fastest first.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`] and the errors of launches.
    pub fn measure(&self) -> Result<Vec<Measured>> {
        let all = self.libraries.engines(&self.device, self.problem);
        let are_alike = |a: &Engine, b: &Engine| match (a, b) {
            (Engine::TwoFour(a), Engine::TwoFour(b)) => discriminant(a) == discriminant(b),
            _ => a.name() == b.name(),
        };
        let kinds = all.chunk_by(are_alike).map(|engines| {
            let mut planned = Vec::new();
            let begun = Instant::now();
            for engine in engines {
                // A library may list algorithms that do not support the problem.
                planned.extend(self.product(*engine).ok().map(|product| (*engine, product)));
                if begun.elapsed() > PLANNING {
                    break;
                }
            }
            Ok(planned)
        });
        let mut best = best_of_kinds(&mut Timer::new(&self.device, self.stream())?, self, Trial::contender, kinds)?;
        // Keeps only the best of this crate's kinds.
        best.sort_by(|a, b| a.us.total_cmp(&b.us));
        let mut engines = HashSet::new();
        best.retain(|measured| engines.insert(measured.how.name()));
        Ok(best)
    }
}

/// Returns the best plan of each kind, and their times when interleaved. At any time the plans of one kind are in
/// memory, and the best of the kinds before.
pub(super) fn best_of_kinds<T, P, How>(
    timer: &mut Timer<'_>,
    trial: &T,
    contender: for<'a> fn(&'a T, &'a P) -> Contender<'a>,
    kinds: impl Iterator<Item = Result<Vec<(How, P)>>>,
) -> Result<Vec<Measured<How>>> {
    let mut best = Vec::new();
    for plans in kinds {
        let mut plans = plans?;
        let contenders = plans.iter().map(|(_, plan)| contender(trial, plan)).collect();
        if let Some((which, _)) = timer.fastest(contenders)? {
            best.push(plans.swap_remove(which));
        }
    }
    let mut contenders: Vec<Contender<'_>> = best.iter().map(|(_, plan)| contender(trial, plan)).collect();
    let times = timer.alternate(&mut contenders, ROUNDS)?;
    drop(contenders);
    let measured = |((how, _), time): ((How, P), Time)| Measured { how, kernel: time.kernel, us: time.us };
    Ok(best.into_iter().zip(times).map(measured).collect())
}

/// How long the algorithms of a library are planned, the library's own choice first. cuSPARSELt 0.8 takes a quarter of
/// a second for each of its algorithms of f16, and less than a millisecond for those of other types.
pub const PLANNING: Duration = Duration::from_millis(700);

/// Rounds in which the best plans of all kinds are interleaved.
const ROUNDS: u32 = 11;
