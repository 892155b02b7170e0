"""Many runs of `twofour train` that differ by method and seed: what `accuracy_study.py` and `vision_study.py` have in
common.
"""

import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import time

# What each run changes in the recipe.
METHODS = {
    "dense": {"sparsity.method": "dense"},
    "fixed mask": {"sparsity.method": "fixed"},
    "ste, rows": {"sparsity.method": "ste"},
    "ste, transposable": {"sparsity.method": "ste", "sparsity.mask": "greedy"},
    "sr-ste": {"sparsity.method": "sr-ste"},
    "fst": {"sparsity.method": "fst"},
    "fst without mvue": {"sparsity.method": "fst", "sparsity.weight_gradient": "dense"},
    "fst, masks every step": {"sparsity.method": "fst", "sparsity.mask_every": 1},
    "fst, masks every step, decay 0": {"sparsity.method": "fst", "sparsity.mask_every": 1, "sparsity.decay": 0.0},
    "fst, masks every step, decay 2e-5": {"sparsity.method": "fst", "sparsity.mask_every": 1, "sparsity.decay": 2e-5},
    "fst, masks every step, decay 2e-3": {"sparsity.method": "fst", "sparsity.mask_every": 1, "sparsity.decay": 2e-3},
    "s-ste": {"sparsity.method": "s-ste"},
    "s-ste, mvue": {"sparsity.method": "s-ste", "sparsity.weight_gradient": "mvue"},
    "activation": {"sparsity.method": "activation"},
    "s-ste, fp8": {"sparsity.method": "s-ste", "sparsity.precision": "fp8"},
    "fst, fp8": {"sparsity.method": "fst", "sparsity.precision": "fp8"},
    "step": {"sparsity.method": "step"},
    "step, geometric mean": {"sparsity.method": "step", "sparsity.switch_mean": "geometric"},
    "gradual": {"sparsity.method": "gradual"},
    "sr-ste, decay searched": {"sparsity.method": "sr-ste", "sparsity.decay": "auto"},
    "fst, decay searched": {"sparsity.method": "fst", "sparsity.decay": "auto"},
    "fst, masks every step, decay searched": {
        "sparsity.method": "fst",
        "sparsity.mask_every": 1,
        "sparsity.decay": "auto",
    },
    "fst, toolkit's settings": {"sparsity.method": "fst", "sparsity.defaults": "2by4-pretrain"},
    "s-ste, toolkit's settings": {"sparsity.method": "s-ste", "sparsity.defaults": "2by4-pretrain"},
    "40 % sparse, then dense": {"sparsity.method": "ste", "sparsity.mask": "greedy", "sparsity.end": 0.4},
    "60 % sparse, then dense": {"sparsity.method": "ste", "sparsity.mask": "greedy", "sparsity.end": 0.6},
    "70 % sparse, then dense": {"sparsity.method": "ste", "sparsity.mask": "greedy", "sparsity.end": 0.7},
    "80 % sparse, then dense": {"sparsity.method": "ste", "sparsity.mask": "greedy", "sparsity.end": 0.8},
    "90 % sparse, then dense": {"sparsity.method": "ste", "sparsity.mask": "greedy", "sparsity.end": 0.9},
    "100 % sparse": {"sparsity.method": "ste", "sparsity.mask": "greedy"},
}


def file_name(method: str, seed: int) -> str:
    words = "".join(c if c.isalnum() or c == "-" else " " for c in method).split()
    return f"{'-'.join(words)}-{seed}"


def toml(value) -> str:
    return json.dumps(value)


def parser(description: str, recipe: str, methods: list) -> argparse.ArgumentParser:
    """The arguments of every study."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("out", type=pathlib.Path)
    found.add_argument("--twofour", type=pathlib.Path, required=True)
    found.add_argument("--recipe", type=pathlib.Path, default=pathlib.Path(recipe))
    found.add_argument("--device", default="cuda")
    found.add_argument("--seeds", type=int, default=3)
    found.add_argument("--only", nargs="+", choices=methods, default=methods)
    found.add_argument("--jobs", type=int, default=4)
    found.add_argument("--limit", type=float, default=1e6, help="seconds, after which no run goes on")
    found.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run's recipe")
    return found


def run(method: str, seed: int, options, data: dict, describe, deadline: float):
    """Runs a method with a seed, on data that `data` names by the recipe's keys. Returns a line that says what came of
    it, and whether it failed.
    """
    name = file_name(method, seed)
    result, folder = options.out / f"{name}.json", options.out / "runs" / name
    if result.exists():
        return f"{name}: there already", False
    left = deadline - time.monotonic()
    if left < 5:
        return f"{name}: no time left", False
    settings = {f"data.{key}": value for key, value in data.items()} | {"training.seed": seed, **METHODS[method]}
    command = [
        str(options.twofour),
        "train",
        str(options.recipe),
        "-o",
        str(folder),
        "--device",
        options.device,
        "--quiet",
    ]
    for key, value in settings.items():
        command += ["--set", f"{key}={toml(value)}"]
    for pair in options.set:
        command += ["--set", pair]
    begun = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return f"{name}: stopped after {time.monotonic() - begun:.0f} s; the same command goes on", False
    if done.returncode != 0:
        return f"{name}: exit code {done.returncode}: {done.stderr.strip()[-400:]}", True
    report = json.loads((folder / "report.json").read_text())
    for key, value in data.items():
        names = [pathlib.Path(path).name for path in ([value] if isinstance(value, str) else value)]
        report["recipe"]["data"][key] = names[0] if isinstance(value, str) else names
    report.pop("plan", None)
    partial = result.with_suffix(".partial")
    partial.write_text(
        json.dumps({"method": method, "seed": seed, "device": options.device, **report}, indent=1) + "\n"
    )
    partial.replace(result)
    return f"{name}: {describe(report)}, {time.monotonic() - begun:.0f} s", False


def study(options, data: dict, describe) -> int:
    """All runs, seed by seed, so that every method has a result early. Returns the exit code: 1 where a run failed."""
    (options.out / "runs").mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit
    failed = False
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(run, method, seed, options, data, describe, deadline)
            for seed in range(options.seeds)
            for method in options.only
        ]
        for done in concurrent.futures.as_completed(runs):
            line, is_failure = done.result()
            failed |= is_failure
            print(line, flush=True)
    return int(failed)
