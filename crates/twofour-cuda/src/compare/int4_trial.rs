//! Interleaved measurement of the methods for an int4 weight.

use std::{mem::discriminant, sync::Arc};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};

use super::{
    Contender, Measured, RandomInt4, Timer,
    epilogue::EpilogueTensors,
    random,
    trial::{best_of_kinds, failed},
};
use crate::{
    Device, Result, Stream,
    problem::Int4Problem,
    raw::gemm::{
        Epilogue,
        int4::{Int4Gemm, Int4Method},
    },
};

/// A problem with a random int4 weight, on which methods are compared.
#[derive(Debug)]
pub struct Int4Trial {
    device: Device,
    problem: Int4Problem,
    stream: Arc<CudaStream>,
    weight: Arc<RandomInt4>,
    x: CudaSlice<u8>,
    out: CudaSlice<u8>,
    /// Where the problem has an epilogue.
    epilogue: Option<EpilogueTensors>,
}

impl Int4Trial {
    /// Returns a trial with a weight of its own.
    ///
    /// # Errors
    /// [`crate::Error::Product`], [`crate::Error::Multiple`] and [`crate::Error::Dimension`] for a problem that kernels
    /// do not support; [`crate::Error::OutOfMemory`], [`crate::Error::Driver`].
    pub fn random(device: &Device, problem: Int4Problem) -> Result<Self> {
        problem.expect_known()?;
        let stream = device.context().new_stream().map_err(failed)?;
        let weight = RandomInt4::new(&stream, problem.features, problem.reduction, problem.granularity)?;
        Self::with_weight(device, problem, &stream, Arc::new(weight))
    }

    /// Returns a trial with a weight that was created for this stream, shape and granularity.
    ///
    /// # Errors
    /// Those of [`Int4Trial::random`].
    pub fn with_weight(
        device: &Device,
        problem: Int4Problem,
        stream: &Arc<CudaStream>,
        weight: Arc<RandomInt4>,
    ) -> Result<Self> {
        problem.expect_known()?;
        let Int4Problem { element, output, features, tokens, reduction, .. } = problem;
        let x = random(stream, element, tokens * reduction, 1)?;
        let out = stream.alloc_zeros::<u8>(features * tokens * output.bytes()).map_err(failed)?;
        let epilogue = problem.epilogue.map(|_| EpilogueTensors::random(stream, output, (features, tokens)));
        let epilogue = epilogue.transpose()?;
        Ok(Self { device: device.clone(), problem, stream: stream.clone(), weight, x, out, epilogue })
    }

    /// Returns the problem.
    pub fn problem(&self) -> Int4Problem {
        self.problem
    }

    /// Returns the buffer that results are written to.
    pub fn out(&self) -> &CudaSlice<u8> {
        &self.out
    }

    /// Returns a planned GEMM as a contender of this trial.
    pub fn contender<'a>(&'a self, decode: &'a Int4Gemm) -> Contender<'a> {
        let weight = self.weight.weight(&self.stream);
        let (x, out) = (self.x.device_ptr(&self.stream).0, self.out.device_ptr(&self.stream).0);
        let raw = Stream(self.stream.cu_stream());
        let given = self.problem.epilogue.zip(self.epilogue.as_ref());
        let epilogue =
            given.map_or(Epilogue::default(), |(kind, tensors)| tensors.of(kind, self.problem.order, &self.stream));
        // SAFETY: all memory is the trial's, as long as the problem requires, and lives until the stream has been
        // waited for.
        let launch = move || unsafe { decode.run(raw, weight, x, out, epilogue) };
        Contender::new("twofour", decode.kernel(), launch)
    }

    /// Returns the best method of each kind, in no order.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], [`crate::Error::Driver`], and those of compiling and loading.
    pub fn measure(&self) -> Result<Vec<Measured<Int4Method>>> {
        let all = Int4Method::all(self.problem, self.device.architecture());
        let plan = |method: &Int4Method| Ok((*method, Int4Gemm::with(&self.device, self.problem, *method)?));
        let kinds = all.chunk_by(|a, b| discriminant(a) == discriminant(b)).map(|kind| kind.iter().map(plan).collect());
        best_of_kinds(&mut Timer::new(&self.device, &self.stream)?, self, Int4Trial::contender, kinds)
    }
}
