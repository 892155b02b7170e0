//! Device time: contenders interleaved, between two events, with random data and after L2 was emptied.

mod int4;
mod measured;
pub mod read;
mod tensors;
mod timer;

use std::{collections::HashSet, mem::discriminant, sync::Arc};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};

pub use int4::Int4Trial;
pub use measured::Measured;
pub use tensors::{RandomInt4, RandomWeight, random};
pub use timer::{Contender, Time, Timer};

use crate::{
    Device, Error, Result, Stream,
    engine::{Engine, Product, Weight, dense_output},
    gemm::Problem,
    libraries::Libraries,
    prune::Packed,
};

/// A problem with random tensors, for engines to be compared on.
#[derive(Debug)]
pub struct Trial {
    device: Device,
    libraries: Libraries,
    problem: Problem,
    stream: Arc<CudaStream>,
    weight: Arc<RandomWeight>,
    x: CudaSlice<u8>,
    outs: [CudaSlice<u8>; 3],
}

fn failed(error: cudarc::driver::DriverError) -> Error {
    Error::driver("comparing engines", error)
}

impl Trial {
    /// With a weight of its own.
    ///
    /// # Errors
    /// [`Error::Multiple`] for a shape that kernels do not take; [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn random(device: &Device, libraries: &Libraries, problem: Problem) -> Result<Self> {
        let stream = device.context().new_stream().map_err(failed)?;
        let weight = RandomWeight::new(&stream, problem.element, problem.features, problem.reduction)?;
        Self::with_weight(device, libraries, problem, &stream, Arc::new(weight))
    }

    /// With a weight that was made for that stream, element type and shape.
    ///
    /// # Errors
    /// Those of [`Trial::random`].
    pub fn with_weight(
        device: &Device,
        libraries: &Libraries,
        problem: Problem,
        stream: &Arc<CudaStream>,
        weight: Arc<RandomWeight>,
    ) -> Result<Self> {
        let Problem { element, features, tokens, reduction, .. } = problem;
        let x = random(stream, element, tokens * reduction, 1)?;
        // Theirs may be wider than ours.
        let bytes = features * tokens * dense_output(problem).bytes();
        let out = || stream.alloc_zeros::<u8>(bytes).map_err(failed);
        let outs = [out()?, out()?, out()?];
        let (device, libraries, stream) = (device.clone(), libraries.clone(), stream.clone());
        Ok(Self { device, libraries, problem, stream, weight, x, outs })
    }

    /// The problem.
    pub fn problem(&self) -> Problem {
        self.problem
    }

    /// The stream that everything is launched on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The weight.
    pub fn weight(&self) -> &RandomWeight {
        &self.weight
    }

    /// The activations, `[tokens, reduction]`.
    pub fn x(&self) -> &CudaSlice<u8> {
        &self.x
    }

    /// The memory that an engine's product writes its result to.
    pub fn out(&self, engine: Engine) -> &CudaSlice<u8> {
        match engine {
            Engine::TwoFour(_) => &self.outs[0],
            Engine::CusparseLt(_) => &self.outs[1],
            Engine::CublasLt(_) => &self.outs[2],
        }
    }

    /// The product by an engine.
    ///
    /// # Errors
    /// Those of [`Product::new`].
    pub fn product(&self, engine: Engine) -> Result<Product> {
        let at = |memory: &CudaSlice<u8>| memory.device_ptr(&self.stream).0;
        let packed = Packed { values: at(&self.weight.values), meta: at(&self.weight.meta) };
        let weight = Weight { dense: at(&self.weight.dense), packed: Some(packed) };
        // SAFETY: the weight is 2:4 and lives as long as the trial, which contenders borrow.
        unsafe { Product::new(&self.device, &self.libraries, &self.stream, self.problem, engine, weight) }
    }

    /// A product of this trial as a contender.
    pub fn contender<'a>(&'a self, product: &'a Product) -> Contender<'a> {
        let x = self.x.device_ptr(&self.stream).0;
        let out = self.out(product.engine()).device_ptr(&self.stream).0;
        let raw = Stream(self.stream.cu_stream());
        // SAFETY: all memory is the trial's, as long as the problem asks for, and lives until the stream has been waited for.
        let launch = move || unsafe { product.run(raw, x, out) };
        Contender::new(product.engine().name(), product.kernel(), launch)
    }

    /// Each engine at its best, the fastest first: those that take the problem.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`] and what a launch may answer.
    pub fn measure(&self) -> Result<Vec<Measured>> {
        let all = self.libraries.engines(&self.device, self.problem);
        let are_alike = |a: &Engine, b: &Engine| match (a, b) {
            (Engine::TwoFour(a), Engine::TwoFour(b)) => discriminant(a) == discriminant(b),
            _ => a.name() == b.name(),
        };
        // A library may list what it does not take.
        let product = |engine: &Engine| Some((*engine, self.product(*engine).ok()?));
        let kinds = all.chunk_by(are_alike).map(|engines| Ok(engines.iter().filter_map(product).collect()));
        let mut best = best_of_kinds(&mut Timer::new(&self.device, &self.stream)?, self, Trial::contender, kinds)?;
        // Of our kinds only the best.
        best.sort_by(|a, b| a.us.total_cmp(&b.us));
        let mut engines = HashSet::new();
        best.retain(|measured| engines.insert(measured.how.name()));
        Ok(best)
    }
}

/// The best of each kind of plans, and what they take against each other. Plans of one kind are there at once, and the best of those before.
fn best_of_kinds<T, P, How>(
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

/// Rounds of the best of each kind against each other.
const ROUNDS: u32 = 11;
