//! GEMMs with a packed weight: sparse, or dense where that is measured to be faster.
//!
//! A dense GEMM reads the weight from the workspace, into which each call unpacks it, so that no dense copy is kept.
//! The layers of a stream share that memory.
//!
//! ```text
//! first call for a shape, up to a power of two of tokens:  time both ways with its operands, keep the faster one
//! later calls:  sparse:  packed weight ──────────────────────────▶ sparse GEMM
//!               dense:   packed weight ──unpack──▶ workspace ────▶ dense GEMM of cuBLASLt, epilogue
//! ```

use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaSlice, DevicePtr as _};

use super::{LayerContext, dense::interleaved_times, forward::workspace_bytes};
use crate::{
    DevicePtr, Error, Result,
    cublaslt::PartialSums,
    dense_gemm::{DenseGemm, DensePlans},
    problem::{GemmProblem, Order, XOrder},
    raw::{
        gemm::{Epilogue, Gemm, GemmOperands},
        unpack::Unpacker,
    },
};

/// Fewest tokens for which a dense GEMM is timed. Unpacking reads 9/16 of the dense weight's bytes and writes all of
/// them; with fewer tokens a dense GEMM moves little more than that, so that both together are no faster.
const MIN_TOKENS: usize = 512;

/// The dense GEMM is chosen where it takes, unpacking included, at most this share of the sparse GEMM's time: less is
/// noise.
const SHARE: f64 = 0.97;

/// The alignment that cuBLASLt's heuristics take for granted, in bytes.
const ALIGNMENT: u64 = 256;

/// A GEMM with a packed weight.
#[derive(Debug, Clone)]
pub(super) struct PackedGemm {
    sparse: Gemm,
    /// None where a dense GEMM is not considered.
    dense: Option<Arc<Unpacked>>,
}

/// The same GEMM with the weight unpacked.
#[derive(Debug)]
struct Unpacked {
    unpacker: Unpacker,
    gemm: DenseGemm,
    shape: (usize, usize),
    /// The bytes of the dense weight.
    bytes: usize,
    /// Whether it is faster, once that was measured. Problems that [`similar`] makes one share it.
    is_faster: Arc<OnceLock<bool>>,
}

/// The way that a call takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Sparse,
    Dense,
    /// Both are timed.
    Measured,
}

/// The key of a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Similar(GemmProblem);

/// Returns the problem that stands for those with nearly as many tokens: a choice is measured once for all of them, so
/// that prompts of any length do not each pay for it.
fn similar(problem: GemmProblem) -> Similar {
    let tokens = problem.tokens.checked_next_power_of_two().unwrap_or(usize::MAX);
    Similar(GemmProblem { tokens, ..problem })
}

/// Returns whether a dense GEMM may be faster than the sparse one and is the same product in no more memory than the
/// weight's. cuBLASLt rounds sums of 8-bit floats to the result's type before an epilogue scales them, which f16 cannot
/// hold, and those of 8-bit integers would need a buffer as large as the result in i32.
fn is_considered(problem: GemmProblem) -> bool {
    let scales_8_bits = problem.element.bytes() == 1 && (problem.epilogue.is_some() || problem.output.bytes() < 4);
    problem.tokens >= MIN_TOKENS
        && !scales_8_bits
        && problem.reduction > 0
        && !problem.is_mixed()
        && !problem.accumulate
        && (problem.x, problem.order) == (XOrder::TokensFirst, Order::TokensFirst)
}

impl LayerContext {
    /// Returns the GEMM with a packed weight for a problem.
    pub(super) fn packed_gemm(&self, problem: GemmProblem) -> Result<PackedGemm> {
        let sparse = self.gemm(problem)?;
        let dense = if is_considered(problem) && self.shared.times_plans { self.unpacked(problem) } else { None };
        Ok(PackedGemm { sparse, dense })
    }

    /// Returns the dense way of a problem, or `None` where there is none, and while it must be planned during a
    /// capture.
    fn unpacked(&self, problem: GemmProblem) -> Option<Arc<Unpacked>> {
        let planned: Result<Option<Arc<Unpacked>>> = self.plans().of(problem, || {
            self.expect_not_capturing("planning a dense GEMM")?;
            // What the library does not compute is computed by the sparse kernels.
            Ok(Unpacked::new(self, problem).ok().map(Arc::new))
        });
        planned.ok().flatten()
    }
}

impl PackedGemm {
    /// Returns the way that a call with operands at these addresses takes, with what `parts` returns for its bytes of
    /// workspace. A dense GEMM whose workspace is missing, because a stream is captured that did not run it before or
    /// because memory is short, is a sparse one.
    pub(super) fn place<T>(
        &self,
        context: &LayerContext,
        (x, out): (DevicePtr, DevicePtr),
        parts: &mut dyn FnMut(usize) -> Result<T>,
    ) -> Result<(Way, T)> {
        let aligned = (x | out).is_multiple_of(ALIGNMENT);
        let dense = self.dense.as_ref().filter(|_| aligned);
        let mut way = Way::Sparse;
        match dense.map(|dense| (dense, dense.is_faster.get())) {
            Some((dense, Some(true))) => match parts(dense.workspace_bytes()) {
                Err(Error::Capturing { .. } | Error::OutOfMemory { .. }) => {}
                found => return Ok((Way::Dense, found?)),
            },
            Some((_, None)) if context.expect_not_capturing("timing a GEMM").is_ok() => way = Way::Measured,
            _ => {}
        }
        Ok((way, parts(workspace_bytes(&self.sparse, x, out))?))
    }

    /// Returns the bytes of workspace of the sparse GEMM, whatever the alignment of its operands.
    pub(super) fn most_sparse_bytes(&self) -> usize {
        self.sparse.unaligned_workspace_bytes()
    }

    /// Launches the GEMM. Once a dense one is chosen, `parts` allocates the workspace of later calls, which may be
    /// captured.
    ///
    /// # Errors
    /// Those of [`Gemm::run`]; [`Error::Vendor`].
    ///
    /// # Safety
    /// As [`Gemm::run`] requires. `way` and the workspace are what [`PackedGemm::place`] returned for these addresses
    /// and this `parts`, which keeps the memory it returns alive until the stream has passed the call.
    pub(super) unsafe fn run<T>(
        &self,
        context: &LayerContext,
        way: Way,
        operands: GemmOperands,
        epilogue: Epilogue,
        parts: &mut dyn FnMut(usize) -> Result<T>,
    ) -> Result<()> {
        // SAFETY: this function requires the same.
        let sparse = || unsafe { self.sparse.run(context.raw(), operands, epilogue) };
        match (way, &self.dense) {
            (Way::Sparse, _) | (_, None) => sparse(),
            // SAFETY: the workspace was allocated for this way, as this function requires.
            (Way::Dense, Some(dense)) => unsafe { dense.run(context, operands, operands.workspace, epilogue) },
            (Way::Measured, Some(dense)) => {
                let Ok(memory) = context.allocate(dense.workspace_bytes()) else {
                    // Where there is no memory for the trial, there is none for later calls.
                    let _ = dense.is_faster.set(false);
                    return sparse();
                };
                let workspace = address(context, &memory);
                // SAFETY: the memory was allocated above for the dense way, and the rest is valid, as this function
                // requires.
                let unpacked = || unsafe { dense.run(context, operands, workspace, epilogue) };
                // A trial that fails, for instance beside a capture of another stream, is left to the next call.
                let Ok(found) = is_faster(context, &sparse, &unpacked) else { return sparse() };
                // Another thread may have measured it, too: one choice is for all.
                if !*dense.is_faster.get_or_init(|| found) {
                    return sparse();
                }
                unpacked()?;
                // Without it later calls are sparse.
                let _ = parts(dense.workspace_bytes());
                Ok(())
            }
        }
    }
}

fn address(context: &LayerContext, memory: &CudaSlice<u8>) -> DevicePtr {
    memory.device_ptr(context.stream()).0
}

/// Returns whether the dense GEMM is faster. One that the library plans but does not run is not.
fn is_faster(
    context: &LayerContext,
    sparse: &dyn Fn() -> Result<()>,
    unpacked: &dyn Fn() -> Result<()>,
) -> Result<bool> {
    sparse()?;
    if unpacked().is_err() {
        return Ok(false);
    }
    let times = interleaved_times(context, &[sparse, unpacked])?;
    Ok(times[1] <= SHARE * times[0])
}

impl Unpacked {
    fn new(context: &LayerContext, problem: GemmProblem) -> Result<Self> {
        // The library's first choice, as a framework takes it: only what is timed is worth more than one.
        let plans = DensePlans::new(context.cublaslt()?, problem, PartialSums::Wide, 1)?;
        let shape = (problem.features, problem.reduction);
        Ok(Self {
            unpacker: context.unpacker(problem.element)?,
            gemm: plans.take(context.device(), 0)?,
            shape,
            bytes: super::elements(shape.0, shape.1)?.saturating_mul(problem.element.bytes()),
            is_faster: context.plans().of(similar(problem), || Ok::<_, Error>(Arc::default()))?,
        })
    }

    /// The bytes of the workspace's parts, each a multiple of 256: the dense weight, the library's workspace, and its
    /// result.
    fn parts(&self) -> [usize; 3] {
        let [workspace, sums] = self.gemm.workspace_bytes();
        [self.bytes, workspace, sums].map(|bytes| bytes.next_multiple_of(ALIGNMENT as usize))
    }

    fn workspace_bytes(&self) -> usize {
        self.parts().iter().sum()
    }

    /// Unpacks the weight, and launches the dense GEMM.
    ///
    /// # Safety
    /// That of [`Gemm::run`], but for the workspace: it has [`Unpacked::workspace_bytes`].
    unsafe fn run(
        &self,
        context: &LayerContext,
        operands: GemmOperands,
        workspace: DevicePtr,
        epilogue: Epilogue,
    ) -> Result<()> {
        let (GemmOperands { weight, x, out, .. }, stream) = (operands, context.raw());
        let [bytes, library, _] = self.parts().map(|bytes| bytes as u64);
        let (at, sums) = (workspace + bytes, workspace + bytes + library);
        // SAFETY: the operands are valid, and the workspace has room for each part, as this function requires.
        unsafe {
            self.unpacker.run(stream, weight, self.shape, workspace)?;
            self.gemm.run(stream, [workspace, x, out], [at, sums], epilogue)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, DataType, Device, layer::DeviceBuffer, problem::EpilogueKind, raw::gemm::packed_bytes};
    use half::bf16;
    use twofour::{Compressed, MatrixRef};

    #[test]
    fn a_dense_gemm_is_considered_for_many_tokens_of_one_type_and_one_choice_is_for_similar_numbers_of_them() {
        let problem = |tokens| GemmProblem::plain(DataType::BF16, DataType::BF16, 768, tokens, 3072);
        assert!(!is_considered(problem(MIN_TOKENS - 1)) && is_considered(problem(MIN_TOKENS)));
        assert!(!is_considered(GemmProblem { accumulate: true, ..problem(4096) }));
        assert!(!is_considered(GemmProblem { x: XOrder::ReductionFirst, ..problem(4096) }));
        assert!(!is_considered(GemmProblem { order: Order::FeaturesFirst, ..problem(4096) }));
        assert!(!is_considered(GemmProblem { reduction: 0, ..problem(4096) }));
        for element in [DataType::E4M3, DataType::I8] {
            let plain = |output| GemmProblem::plain(element, output, 768, 4096, 3072);
            let sums = if element == DataType::I8 { DataType::I32 } else { DataType::F32 };
            assert!(is_considered(plain(sums)) && !is_considered(plain(DataType::F16)));
            assert!(!is_considered(GemmProblem { epilogue: Some(EpilogueKind::Scales), ..plain(sums) }));
            assert!(!is_considered(GemmProblem { x_element: DataType::E5M2, ..plain(sums) }));
        }
        assert_eq!(similar(problem(1025)), similar(problem(2048)));
        assert_ne!(similar(problem(1024)), similar(problem(1025)));
        assert_ne!(
            similar(problem(2048)),
            similar(GemmProblem { epilogue: Some(EpilogueKind::Bias), ..problem(2048) })
        );
        assert_eq!(similar(problem(usize::MAX)).0.tokens, usize::MAX);
    }

    fn context() -> Option<LayerContext> {
        match Device::open(0) {
            Ok(device) => Some(LayerContext::new(&device).unwrap()),
            Err(error @ (Error::NoDriver | Error::NoDevice { .. })) => {
                assert!(std::env::var_os("TWOFOUR_REQUIRE_GPU").is_none(), "TWOFOUR_REQUIRE_GPU is set: {error}");
                eprintln!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn numbers(count: usize, seed: usize) -> Vec<bf16> {
        (0..count).map(|i| bf16::from_f32(((i * 37 + seed * 11) % 61) as f32 / 30.0 - 1.0)).collect()
    }

    /// Both ways, whichever is the faster, with every epilogue of a layer, with shapes that need padding and with
    /// integers. The measured call gives the bits of the way that it chooses.
    #[test]
    fn the_dense_way_computes_what_the_sparse_one_does() {
        let Some(context) = context() else { return };
        let epilogues = [
            (false, Activation::Identity),
            (true, Activation::Identity),
            (true, Activation::Relu),
            (false, Activation::Gelu),
        ];
        for (rows, cols, tokens) in [(256, 192, 512), (72, 136, 600)] {
            let weight =
                Compressed::from_pruned(MatrixRef::new(rows, cols, &numbers(rows * cols, 1)).unwrap()).unwrap();
            let packed = crate::layer::borrowed::encode(&weight).unwrap();
            let packed = DeviceBuffer::from_host(&context, &packed).unwrap();
            let x = DeviceBuffer::from_host(&context, &numbers(tokens * cols, 2)).unwrap();
            let bias = DeviceBuffer::from_host(&context, &numbers(rows, 3)).unwrap();
            let at = |buffer: &DeviceBuffer| buffer.expect("a tensor", &context, buffer.dtype(), buffer.len()).unwrap();
            for (has_bias, activation) in epilogues {
                let epilogue = Epilogue { bias: has_bias.then(|| at(&bias)), activation, ..Epilogue::default() };
                let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, rows, tokens, cols);
                let problem = GemmProblem { epilogue: epilogue.kind(), ..problem };
                let gemm = context.packed_gemm(problem).unwrap();
                let dense = gemm.dense.as_ref().expect("cuBLASLt computes it");
                let values = at(&packed);
                let meta = values + packed_bytes(DataType::BF16, rows, cols).values as u64;
                let run = |way, bytes: usize| {
                    let y = DeviceBuffer::from_host(&context, &vec![bf16::NAN; tokens * rows]).unwrap();
                    let mut work = context.work();
                    let [workspace] = work.parts([bytes]).unwrap();
                    let weight = crate::raw::Packed { values, meta };
                    let operands = GemmOperands { weight, x: at(&x), out: at(&y), workspace };
                    // SAFETY: the tensors were allocated above for the problem, and the workspace for the way.
                    unsafe { gemm.run(&context, way, operands, epilogue, &mut |bytes| work.parts([bytes])) }.unwrap();
                    drop(work);
                    y.to_host::<bf16>().unwrap()
                };
                let sparse = run(Way::Sparse, gemm.most_sparse_bytes());
                let unpacked = run(Way::Dense, dense.workspace_bytes());
                for (i, (a, b)) in sparse.iter().zip(&unpacked).enumerate() {
                    let (a, b) = (a.to_f32(), b.to_f32());
                    assert!((a - b).abs() <= 2e-2 * a.abs().max(1.0), "{problem:?}, {i}: {a} and {b}");
                }
                let measured = run(Way::Measured, gemm.most_sparse_bytes());
                let is_faster = *dense.is_faster.get().expect("it was measured");
                assert!(measured == if is_faster { unpacked } else { sparse }, "{problem:?}");
            }
        }
    }
}
