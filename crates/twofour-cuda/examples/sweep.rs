//! Times every method of the GEMM on a grid of shapes, one JSON object a line: what the cost model is fitted to.
//!
//! `sweep OUT DTYPE[,DTYPE] FEATURESxREDUCTION[,...] TOKENS[,...] EPILOGUE[,...]` appends to OUT and skips what is there already. An epilogue is none, bias, bias-gelu or scales.

use std::{collections::HashSet, error::Error, io::Write};

use twofour_cuda::{
    DataType, Device,
    libraries::Libraries,
    measure::{Timer, Trial},
    problem::{EpilogueKind, GemmProblem},
    raw::{engine::Engine, gemm::GemmMethod},
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, out, dtypes, shapes, tokens, epilogues] = arguments.as_slice() else {
        return Err("usage: sweep OUT DTYPES SHAPES TOKENS EPILOGUES".into());
    };
    let device = Device::open(0)?;
    let libraries = Libraries::found(&device);
    let there: HashSet<String> = std::fs::read_to_string(out)
        .unwrap_or_default()
        .lines()
        .filter_map(|line| Some(serde_json::from_str::<serde_json::Value>(line).ok()?["case"].as_str()?.to_string()))
        .collect();
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(out)?;
    for dtype in dtypes.split(',') {
        for shape in shapes.split(',') {
            for tokens in tokens.split(',') {
                for epilogue in epilogues.split(',') {
                    let case = format!("{dtype} {shape} {tokens} {epilogue}");
                    if there.contains(&case) {
                        continue;
                    }
                    let times = times(&device, &libraries, problem(dtype, shape, tokens, epilogue)?)?;
                    writeln!(file, "{}", serde_json::json!({ "case": case, "times": times }))?;
                }
            }
        }
    }
    Ok(())
}

fn problem(dtype: &str, shape: &str, tokens: &str, epilogue: &str) -> Result<GemmProblem, Box<dyn Error>> {
    let element = [DataType::BF16, DataType::F16, DataType::E4M3, DataType::I8].into_iter().find(|e| e.name() == dtype);
    let element = element.ok_or("an unknown data type")?;
    let output = if element.bytes() == 2 { element } else { DataType::BF16 };
    let (features, reduction) = shape.split_once('x').ok_or("a shape is FEATURESxREDUCTION")?;
    let epilogue = match epilogue {
        "none" => None,
        "bias" => Some(EpilogueKind::Bias),
        "bias-gelu" => Some(EpilogueKind::Activation),
        "scales" => Some(EpilogueKind::Scales),
        _ => return Err("an unknown epilogue".into()),
    };
    let plain = GemmProblem::plain(element, output, features.parse()?, tokens.parse()?, reduction.parse()?);
    Ok(GemmProblem { epilogue, ..plain })
}

/// Contender, kernel and microseconds of every method, and of cuBLASLt's first algorithms.
fn times(
    device: &Device,
    libraries: &Libraries,
    problem: GemmProblem,
) -> Result<Vec<serde_json::Value>, Box<dyn Error>> {
    let trial = Trial::random(device, libraries, problem)?;
    // With many tokens split-K and the kernels for small batches have no advantage.
    let is_large =
        |method: &GemmMethod| matches!(method, GemmMethod::Tiled(tile) if tile.split.is_none_or(|split| split == 1));
    let fits = |method: &GemmMethod| problem.tokens <= 2048 || is_large(method);
    let methods = GemmMethod::all(problem, device.architecture()).into_iter().filter(fits);
    let mut engines: Vec<Engine> = methods.map(Engine::TwoFour).collect();
    engines.extend((0..if problem.tokens > 1024 { 1 } else { 4 }).map(Engine::CublasLt));
    let products: Vec<_> = engines.iter().filter_map(|engine| trial.product(*engine).ok()).collect();
    let mut contenders: Vec<_> = products.iter().map(|product| trial.contender(product)).collect();
    let times = Timer::new(device, trial.stream())?.alternate(&mut contenders, 5)?;
    Ok(times.iter().map(|time| serde_json::json!([time.contender, time.kernel, time.us])).collect())
}
