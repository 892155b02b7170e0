#!/usr/bin/env python3
"""Validation loss of a GPT by training method, over seeds: many runs of `twofour train`.

    python3 bench/accuracy_study.py OUT --twofour target/release/twofour --text FILE... [--recipe recipes/study.toml] [--device cuda] [--seeds 3]
        [--only METHOD...] [--jobs 4] [--limit SECONDS] [--set KEY=VALUE...]

Each run leaves OUT/<method>-<seed>.json, what `twofour train` reports, without the recipe's paths. A run whose file is there is not repeated, and one that was stopped goes on where it
was, so a study may take many sittings. JOBS runs share the device. Runs begin in the order seed by seed, so that every method has a result early.
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
    "fst, masks every step, decay searched": {"sparsity.method": "fst", "sparsity.mask_every": 1, "sparsity.decay": "auto"},
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


def run(method: str, seed: int, options, deadline: float) -> str:
    name = file_name(method, seed)
    result, folder = options.out / f"{name}.json", options.out / "runs" / name
    if result.exists():
        return f"{name}: there already"
    left = deadline - time.monotonic()
    if left < 5:
        return f"{name}: no time left"
    settings = {"data.text": [str(path.resolve()) for path in options.text], "training.seed": seed, **METHODS[method]}
    command = [str(options.twofour), "train", str(options.recipe), "-o", str(folder), "--device", options.device, "--quiet"]
    for key, value in settings.items():
        command += ["--set", f"{key}={toml(value)}"]
    for pair in options.set:
        command += ["--set", pair]
    begun = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return f"{name}: stopped after {time.monotonic() - begun:.0f} s; the same command goes on"
    if done.returncode != 0:
        return f"{name}: exit code {done.returncode}: {done.stderr.strip()[-400:]}"
    report = json.loads((folder / "report.json").read_text())
    report["recipe"]["data"]["text"] = [pathlib.Path(path).name for path in report["recipe"]["data"]["text"]]
    report.pop("plan", None)
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps({"method": method, "seed": seed, "device": options.device, **report}, indent=1) + "\n")
    partial.replace(result)
    return f"{name}: validation loss {report['val_loss']:.4f}, {time.monotonic() - begun:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--twofour", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--recipe", type=pathlib.Path, default=pathlib.Path("recipes/study.toml"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds, after which no run goes on")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run's recipe")
    options = parser.parse_args()
    (options.out / "runs").mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(run, method, seed, options, deadline) for seed in range(options.seeds) for method in options.only]
        for done in concurrent.futures.as_completed(runs):
            print(done.result(), flush=True)


if __name__ == "__main__":
    main()
