#!/usr/bin/env python3
"""The final loss of a small GPT, dense and with each of twofour's recipes, over seeds.

    python bench/studies/gpt_study.py text.txt results.json [--seeds 3] [--methods dense semi-sparse s-ste fst]
        [options of the example]

The model and its training are those of python/examples/gpt_pretrain.py. Every finished run is written to the results at
once; a run that is there is not repeated, so that an interrupted study goes on where it was. Other settings than those
of the file are refused.

semi-sparse runs with --algo, as in the example; a method written semi-sparse:<algo> with that one, where semi-sparse:
is the peers' signed rule.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import statistics
import sys

import torch

import twofour

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python" / "examples"))
import gpt_pretrain  # noqa: E402

#: Options that do not change what a run computes.
NOT_SETTINGS = {"data", "results", "seeds", "methods", "method", "seed", "report_every", "algo"}


def load(path: pathlib.Path, settings: dict) -> dict:
    """The results so far.

    Raises:
        SystemExit: where they were computed with other settings.
    """
    if not path.exists():
        return {"study": "final loss of a small GPT", "settings": settings, "runs": []}
    results = json.loads(path.read_text())
    differing = sorted(
        key for key in settings | results["settings"] if settings.get(key) != results["settings"].get(key)
    )
    if differing:
        raise SystemExit(
            f"{path} has other settings ({', '.join(differing)}): choose another file, or the settings"
            f" {json.dumps(results['settings'])}"
        )
    return results


def save(path: pathlib.Path, results: dict) -> None:
    """Writes the results, replacing the file in one step."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(temporary, path)


def table(runs: list[dict]) -> str:
    """A line for each method: median, least and largest held-out loss, and the difference of the medians from dense."""
    by_method: dict[str, list[float]] = {}
    for run in runs:
        by_method.setdefault(run["method"], []).append(run["held_out_loss"])
    dense = statistics.median(by_method["dense"]) if "dense" in by_method else None
    lines = [f"{'method':<40} {'runs':>4} {'median':>8} {'least':>8} {'largest':>8} {'to dense':>9}"]
    for method, losses in by_method.items():
        median = statistics.median(losses)
        difference = "" if dense is None else f"{median - dense:+9.4f}"
        lines.append(f"{method:<40} {len(losses):4} {median:8.4f} {min(losses):8.4f} {max(losses):8.4f} {difference}")
    return "\n".join(lines)


def main() -> None:
    parser = gpt_pretrain.parser()
    parser.description = __doc__
    parser.add_argument("results", type=pathlib.Path, help="the JSON file that runs are added to")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["dense", "semi-sparse", "s-ste", "fst"])
    options = parser.parse_args()
    unknown = [m for m in options.methods if m.split(":")[0] not in gpt_pretrain.METHODS]
    if unknown:
        parser.error(f"unknown methods {', '.join(unknown)}; known are {', '.join(gpt_pretrain.METHODS)}")
    settings = {key: value for key, value in vars(options).items() if key not in NOT_SETTINGS}
    settings |= {"data": pathlib.Path(options.data).name, "bytes": pathlib.Path(options.data).stat().st_size}
    results = load(options.results, settings)
    done = {(run["method"], run["seed"]) for run in results["runs"]}
    algo = options.algo
    for seed in range(options.seeds):
        for method in options.methods:
            options.method, _, own = method.partition(":")
            options.algo = own if ":" in method else algo
            options.seed = seed
            name = f"semi-sparse:{options.algo}" if options.method == "semi-sparse" else options.method
            if (name, seed) in done:
                continue
            print(f"{name}, seed {seed}", flush=True)
            run = gpt_pretrain.train(options, report=lambda line: print(f"  {line}", flush=True))
            run = {"method": name, "seed": seed, **run, "torch": torch.__version__, "twofour": twofour.__version__}
            run |= {"machine": platform.machine(), "threads": torch.get_num_threads()}
            results["runs"].append(run)
            save(options.results, results)
    print(table(results["runs"]))


if __name__ == "__main__":
    main()
