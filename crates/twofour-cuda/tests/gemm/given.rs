//! A problem with random operands on a device, what its result is in f64, and the comparison of both.

use cudarc::driver::CudaSlice;
use half::bf16;
use twofour_cuda::{
    Activation, Architecture, DataType,
    problem::{EpilogueKind, GemmProblem, Order, XOrder},
    raw::{
        Packed,
        gemm::{Epilogue, Gemm, GemmMethod, GemmOperands, packed_bytes},
    },
};

use crate::{
    activation::{activated, inexact},
    number::{Number, bytes_of, result_bytes, weight},
    support::{
        Bench, bench,
        compressed::Guarded,
        numbers::{GUARD, Random, result},
    },
};

/// What follows a product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum After {
    Nothing,
    /// A bias of features, for which kernels have stores of its own.
    Bias,
    /// A bias of features and an activation, as a layer has them.
    BiasThen(Activation),
    /// Scales of features.
    FeatureScales,
    /// Scales, both biases and an activation.
    All(Activation),
}

pub(crate) struct Case {
    pub(crate) features: usize,
    pub(crate) tokens: usize,
    pub(crate) reduction: usize,
    pub(crate) output: DataType,
    pub(crate) x_order: XOrder,
    pub(crate) order: Order,
    pub(crate) method: Option<GemmMethod>,
    pub(crate) after: After,
    /// Elements between an aligned address and X, and results between one and the result.
    pub(crate) before: usize,
    pub(crate) accumulate: bool,
}

impl Case {
    /// The plain product of that shape.
    pub(crate) fn plain((features, tokens, reduction): (usize, usize, usize), output: DataType) -> Self {
        Self {
            features,
            tokens,
            reduction,
            output,
            x_order: XOrder::TokensFirst,
            order: Order::TokensFirst,
            method: None,
            after: After::Nothing,
            before: 0,
            accumulate: false,
        }
    }

    /// Of a weight and an X of those types.
    pub(crate) fn problem(&self, element: DataType, x_element: DataType) -> GemmProblem {
        let &Case { features, tokens, reduction, output, x_order, order, after, accumulate, .. } = self;
        let plain = GemmProblem::plain(element, output, features, tokens, reduction);
        let epilogue = match after {
            After::Nothing => None,
            After::Bias => Some(EpilogueKind::Bias),
            After::BiasThen(activation) => Some(EpilogueKind::of(false, activation)),
            After::FeatureScales => Some(EpilogueKind::Scales),
            After::All(activation) => Some(EpilogueKind::of(true, activation)),
        };
        GemmProblem { x_element, x: x_order, order, epilogue, accumulate, ..plain }
    }
}

/// With a method, or the one that a plan chooses.
pub(crate) fn planned(bench: &Bench, problem: GemmProblem, method: Option<GemmMethod>) -> Gemm {
    match method {
        Some(method) => Gemm::with(&bench.device, problem, method),
        None => Gemm::new(&bench.device, problem),
    }
    .unwrap()
}

pub(crate) fn check<T: Number>(bench: &Bench, case: &Case) {
    Given::<T, T>::new(bench, case).check(case.method);
}

/// What a case's product is made of, on the device, and what is expected of it: made once for all methods.
pub(crate) struct Given<'a, T, X> {
    bench: &'a Bench,
    pub(crate) problem: GemmProblem,
    before: usize,
    weight: [CudaSlice<u8>; 2],
    x: CudaSlice<u8>,
    factors: [CudaSlice<f32>; 2],
    biases: [CudaSlice<u8>; 2],
    after: After,
    /// Token, feature, result, and how far from it a sum in f32 may be.
    expected: Vec<(usize, usize, f64, f64)>,
    elements: std::marker::PhantomData<(T, X)>,
}

const ALPHA: f32 = 0.0625;

impl<'a, T: Number, X: Number> Given<'a, T, X> {
    pub(crate) fn new(bench: &'a Bench, case: &Case) -> Self {
        let &Case { features, tokens, reduction, output, x_order, after, before, .. } = case;
        let problem = case.problem(T::ELEMENT, X::ELEMENT);
        let mut random = Random((features * 31 + tokens * 7 + reduction) as u64);
        // The weight is padded; what stands in the padding meets no X, and its results are not stored.
        let (rows, depth) = Gemm::meta_order_of(T::ELEMENT).padded(features, reduction);
        let w = weight::<T>(&mut random, rows, depth);
        let bytes = packed_bytes(T::ELEMENT, features, reduction);
        assert_eq!((bytes_of(w.values()).len(), T::meta(&w).len()), (bytes.values, bytes.meta));
        let x: Vec<X> = (0..tokens * reduction).map(|_| X::of(random.number())).collect();
        let scales =
            |random: &mut Random, n: usize| -> Vec<f32> { (0..n).map(|_| random.number() / 4.0 + 1.0).collect() };
        let (by_feature, by_token) = (scales(&mut random, features), scales(&mut random, tokens));
        let biases = |random: &mut Random, n: usize| -> Vec<f32> {
            (0..n).map(|_| bf16::from_f32(random.number()).to_f32()).collect()
        };
        let (bias, token_bias) = (biases(&mut random, features), biases(&mut random, tokens));
        let bias_bytes =
            |bias: &[f32]| -> Vec<u8> { bias.iter().flat_map(|b| result_bytes(output, f64::from(*b))).collect() };
        let x_there = match x_order {
            XOrder::TokensFirst => bytes_of(&x),
            XOrder::ReductionFirst => {
                let at = |i: usize| x[i % tokens * reduction + i / tokens];
                bytes_of(&(0..x.len()).map(at).collect::<Vec<X>>())
            }
        };
        // Numbers around X that no result may depend on: NaN in every floating-point type.
        let around = |elements: usize| vec![0xFFu8; elements * X::ELEMENT.bytes()];
        let x_there = bench.up(&[around(before), x_there, around(64)].concat());

        let dense: Vec<f64> = w.to_dense().into_iter().map(T::value).collect();
        let x: Vec<f64> = x.into_iter().map(X::value).collect();
        // Sums are in f32, and less exact for 8-bit floats on Hopper.
        let of_sums = match T::ELEMENT {
            DataType::E4M3 | DataType::E5M2 => 2e-3,
            DataType::I8 => 0.0,
            _ => 2e-6,
        };
        let mut expected = Vec::new();
        for t in 0..tokens {
            let row = &x[t * reduction..][..reduction];
            for f in 0..features {
                // All of a small result; of a large one, its edges and a sample.
                let edge = f < 2 || t < 2 || f + 2 >= features || t + 2 >= tokens;
                if features * tokens > 40_000 && !edge && !random.bits().is_multiple_of(61) {
                    continue;
                }
                let terms = dense[f * depth..][..reduction].iter().zip(row).map(|(w, x)| w * x);
                let (mut sum, mut size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                match after {
                    After::Nothing => {}
                    After::Bias => sum += f64::from(bias[f]),
                    After::BiasThen(activation) => sum = activated(activation, sum + f64::from(bias[f])),
                    After::FeatureScales => {
                        let scale = f64::from(by_feature[f]);
                        (sum, size) = (sum * scale, size * scale.abs());
                    }
                    After::All(activation) => {
                        let scale = f64::from(ALPHA * by_feature[f] * by_token[t]);
                        (sum, size) = (sum * scale + f64::from(bias[f]) + f64::from(token_bias[t]), size * scale.abs());
                        sum = activated(activation, sum);
                    }
                }
                let finishing = match after {
                    After::Nothing => 0.0,
                    After::Bias | After::FeatureScales => inexact(Activation::Identity, sum, output),
                    After::BiasThen(activation) | After::All(activation) => inexact(activation, sum, output),
                };
                expected.push((t, f, sum, size * of_sums + finishing));
            }
        }
        Self {
            bench,
            problem,
            before,
            weight: [bench.up(&bytes_of(w.values())), bench.up(&T::meta(&w))],
            x: x_there,
            factors: [bench.up(&by_feature), bench.up(&by_token)],
            biases: [bench.up(&bias_bytes(&bias)), bench.up(&bias_bytes(&token_bias))],
            after,
            expected,
            elements: std::marker::PhantomData,
        }
    }

    pub(crate) fn check(&self, method: Option<GemmMethod>) {
        self.check_plan(&planned(self.bench, self.problem, method));
    }

    pub(crate) fn check_plan(&self, gemm: &Gemm) {
        let GemmProblem { features, tokens, output, order, accumulate, .. } = self.problem;
        let what = format!("{} for {:?}, {:?}, {} before", gemm.kernel(), self.problem, self.after, self.before);
        let width = output.bytes();
        // What is there before: small whole numbers, or bits that no result has.
        let there: Vec<u8> = match accumulate {
            true => (0..features * tokens).flat_map(|i| result_bytes(output, (i % 7) as f64 - 3.0)).collect(),
            false => vec![0xFF; features * tokens * width],
        };
        let found = self.run(gemm, &there, &what);
        for &(t, f, sum, inexact) in &self.expected {
            let at = match order {
                Order::TokensFirst => t * features + f,
                Order::FeaturesFirst => f * tokens + t,
            };
            let before = if accumulate { (at % 7) as f64 - 3.0 } else { 0.0 };
            let (_, first_rounding) = result(&found[at * width..][..width], output, sum);
            let (value, rounding) = result(&found[at * width..][..width], output, sum + before);
            let allowed = rounding + inexact + if accumulate { 1.01 * first_rounding } else { 0.0 };
            assert!(
                (value - sum - before).abs() <= allowed,
                "{what}: token {t}, feature {f}: {value}, expected {sum} + {before} ± {allowed}"
            );
        }
        if accumulate {
            assert!(found == self.run(gemm, &there, &what), "{what}: not the same bits again");
        }
    }

    /// The bytes of the result, of which `there` were before.
    pub(crate) fn run(&self, gemm: &Gemm, there: &[u8], what: &str) -> Vec<u8> {
        let (bench, problem) = (self.bench, self.problem);
        let guard = vec![0xA5u8; GUARD + self.before * problem.output.bytes()];
        let out = bench.up(&[&guard, there, &guard].concat());
        let packed = Packed { values: bench.at(&self.weight[0]), meta: bench.at(&self.weight[1]) };
        let bytes = if self.before == 0 { gemm.workspace_bytes() } else { gemm.unaligned_workspace_bytes() };
        let workspace = Guarded::new(bench, bytes);
        let operands = GemmOperands {
            weight: packed,
            x: bench.at(&self.x) + (self.before * problem.x_element.bytes()) as u64,
            out: bench.at(&out) + guard.len() as u64,
            workspace: if bytes == 0 { 0 } else { workspace.at(bench) },
        };
        let [bias, token_bias] = [0, 1].map(|i: usize| Some(bench.at(&self.biases[i])));
        let after = match self.after {
            After::Nothing => Epilogue::default(),
            After::Bias => Epilogue { bias, ..Epilogue::default() },
            After::BiasThen(activation) => Epilogue { bias, activation, ..Epilogue::default() },
            After::FeatureScales => {
                Epilogue { feature_scales: Some(bench.at(&self.factors[0])), ..Epilogue::default() }
            }
            After::All(activation) => Epilogue {
                alpha: ALPHA,
                feature_scales: Some(bench.at(&self.factors[0])),
                token_scales: Some(bench.at(&self.factors[1])),
                bias,
                token_bias,
                activation,
            },
        };
        // SAFETY: all memory is allocated above and in `new`, as long as the problem asks for, and lives until the
        // stream has been waited for.
        unsafe { gemm.run(bench.stream(), operands, after) }.unwrap();
        let found = bench.down(&out);
        workspace.found(bench, &format!("{what}: workspace"));
        let (before, rest) = found.split_at(guard.len());
        let (found, after) = rest.split_at(there.len());
        assert!(before == guard, "{what}: written before the start");
        assert!(after == guard, "{what}: written beyond the end");
        found.to_vec()
    }
}

/// A device that multiplies such elements.
pub(crate) fn bench_for(element: DataType) -> Option<Bench> {
    let bench = bench()?;
    if matches!(element, DataType::E4M3 | DataType::E5M2) && bench.device.architecture() < Architecture::SM_89 {
        eprintln!("skipped: a GPU without 8-bit floats");
        return None;
    }
    Some(bench)
}
