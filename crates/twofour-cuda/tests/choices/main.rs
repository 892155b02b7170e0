//! Without a device: the method that is chosen for a problem is the one recorded in `choices.txt`, on every
//! architecture.

use std::{fmt::Write, hash::Hasher};

use serde::Serialize;
use twofour::int4::Granularity;
use twofour_cuda::{
    Architecture, DataType,
    problem::{EpilogueKind, GemmProblem, Int4Problem, Order, XOrder},
    raw::gemm::{GemmMethod, int4::Int4Method},
};

/// Architectures, and the SMs of a GPU of each.
const GPUS: [(Architecture, u32); 5] = [
    (Architecture::SM_80, 108),
    (Architecture::SM_89, 142),
    (Architecture::SM_90, 132),
    (Architecture::SM_100, 148),
    (Architecture::SM_120, 170),
];

const ELEMENTS: [DataType; 5] = [DataType::BF16, DataType::F16, DataType::E4M3, DataType::E5M2, DataType::I8];

/// Output and input features.
const SHAPES: [(usize, usize); 5] = [(4096, 4096), (28_672, 4096), (1024, 14_336), (768, 768), (1001, 520)];
const TOKENS: [usize; 12] = [1, 4, 8, 16, 33, 64, 129, 512, 577, 2048, 4096, 16_384];

/// Whether the choice has a line of its own, beside its part in a hash.
fn is_listed(shape: (usize, usize), tokens: usize) -> bool {
    SHAPES[..3].contains(&shape) && [1, 8, 16, 64, 577, 4096].contains(&tokens)
}

fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap().replace('"', "")
}

/// The 64-bit FNV-1a hash of lines.
#[derive(Default)]
struct Fnv(Option<u64>);

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        let start = self.0.unwrap_or(0xcbf2_9ce4_8422_2325);
        self.0 = Some(bytes.iter().fold(start, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)));
    }

    fn finish(&self) -> u64 {
        self.0.unwrap_or(0)
    }
}

/// Adds a problem's choice, the methods worth measuring, and all of them in any order.
fn add<M: Serialize>(hash: &mut Fnv, best: &str, sets: [Vec<M>; 2]) {
    hash.write(best.as_bytes());
    for set in sets {
        let mut names: Vec<String> = set.iter().map(text).collect();
        names.sort();
        hash.write(names.concat().as_bytes());
    }
}

fn best(problem: GemmProblem, (architecture, sms): (Architecture, u32)) -> String {
    // Ampere has no instruction for 8-bit floats.
    if GemmMethod::all(problem, architecture).is_empty() {
        return "none".into();
    }
    GemmMethod::best(problem, architecture, sms).map_or_else(|error| error.to_string(), |best| text(&best))
}

/// A line for each common problem, and a hash of all others.
fn gemms(out: &mut String) {
    for gpu in GPUS {
        let mut others = Fnv::default();
        for element in ELEMENTS {
            let output = if element.bytes() == 2 { element } else { DataType::BF16 };
            for (features, reduction) in SHAPES {
                for tokens in TOKENS {
                    let plain = GemmProblem::plain(element, output, features, tokens, reduction);
                    let is_common = matches!(element, DataType::BF16 | DataType::E4M3 | DataType::I8);
                    if is_common && is_listed((features, reduction), tokens) {
                        let choice = best(plain, gpu);
                        writeln!(out, "{} {element} [{features}, {reduction}] {tokens}: {choice}", gpu.0).unwrap();
                    }
                    let by_feature = GemmProblem { order: Order::FeaturesFirst, ..plain };
                    let f32s = if element == DataType::I8 { DataType::I32 } else { DataType::F32 };
                    let mut problems = vec![
                        plain,
                        by_feature,
                        GemmProblem { x: XOrder::ReductionFirst, accumulate: true, ..by_feature },
                        GemmProblem { output: f32s, ..plain },
                    ];
                    problems.extend(EpilogueKind::ALL.map(|kind| GemmProblem { epilogue: Some(kind), ..plain }));
                    if element == DataType::E4M3 {
                        problems.push(GemmProblem { x_element: DataType::E5M2, ..plain });
                    }
                    for problem in problems {
                        let sets = [GemmMethod::likely(problem, gpu.0), GemmMethod::all(problem, gpu.0)];
                        add(&mut others, &best(problem, gpu), sets);
                    }
                }
            }
        }
        writeln!(out, "{} all: {:016x}", gpu.0, others.finish()).unwrap();
    }
}

fn int4(out: &mut String) {
    for (architecture, sms) in GPUS {
        let mut all = Fnv::default();
        for granularity in [Granularity::Row, Granularity::Group] {
            for (features, reduction) in [(4096, 4096), (28_672, 4096), (1024, 14_336), (768, 768), (16, 128)] {
                for tokens in [1, 4, 5, 8, 9, 16, 17, 32, 33, 64] {
                    let (element, order) = (DataType::BF16, Order::TokensFirst);
                    let problem = Int4Problem {
                        element,
                        output: element,
                        granularity,
                        features,
                        tokens,
                        reduction,
                        order,
                        epilogue: None,
                    };
                    let best = Int4Method::best(problem, architecture, sms);
                    let best = best.map_or("none".into(), |best| text(&best));
                    if granularity == Granularity::Group && is_listed((features, reduction), tokens) {
                        writeln!(out, "{architecture} int4 [{features}, {reduction}] {tokens}: {best}").unwrap();
                    }
                    add(&mut all, &best, [Vec::new(), Int4Method::all(problem, architecture)]);
                }
            }
        }
        writeln!(out, "{architecture} int4 all: {:016x}", all.finish()).unwrap();
    }
}

#[test]
fn the_choice_of_every_problem_is_the_recorded_one() {
    let mut found = String::new();
    gemms(&mut found);
    int4(&mut found);
    let recorded = include_str!("choices.txt");
    let different: Vec<_> = found.lines().zip(recorded.lines()).filter(|(found, recorded)| found != recorded).collect();
    if found != recorded {
        let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("choices.txt");
        std::fs::write(&path, &found).unwrap();
        panic!(
            "{} choices differ, as in (now, recorded) {:?}; all are in {}: where that is meant, copy it to \
             tests/choices",
            different.len(),
            different.first(),
            path.display()
        );
    }
}
