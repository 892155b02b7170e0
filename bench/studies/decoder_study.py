#!/usr/bin/env python3
"""Perplexity of a decoder by pruning method, before and after fine-tuning and in integers: a study that runs the
`twofour` command.

    python3 bench/studies/decoder_study.py OUT --twofour target/release/twofour --text FILE...
        [--recipe recipes/decoder-25m.toml] [--device cuda] [--seed 0]
        [--tune-steps 150] [--tune-rate 3e-4] [--samples 64] [--length 512] [--device-jobs 2] [--cpu-jobs 4]
        [--limit SECONDS] [--set KEY=VALUE...]

The model trains on the first nine tenths of each text; perplexity is that of the rest, which nothing else sees. Then it
is pruned to 2:4 by every method, calibrated on the training text, evaluated, fine-tuned under its mask, and both are
quantized to int8 and int4. SparseGPT also quantizes in its own pass.

Each step leaves OUT/steps/<step>.json with its command and its result. A step whose file is there is not repeated, so a
study that was stopped goes on. Steps begin as soon as those before them have ended: of those on the device so many at
once as --device-jobs says, of those on the CPU --cpu-jobs, which divide its cores. OUT/study.json has all results once
they are there.
"""

import argparse
import concurrent.futures
import json
import pathlib

from steps import Steps

METHODS = ["magnitude", "wanda", "ria", "sparsegpt"]
INTEGERS = ["int8", "int4"]


class Study:
    def __init__(self, options):
        self.options = options
        self.out = options.out
        self.run = Steps(self.out, options.twofour, options.limit, options.device_jobs, options.cpu_jobs).run

    def texts(self):
        """Writes the training text and the held-out text; returns their paths and the held-out share."""
        training, held_out = [], []
        for path in self.options.text:
            text = path.read_text(encoding="utf-8")
            cut = text.rfind("\n", 0, len(text) * 9 // 10) + 1
            training.append(text[:cut])
            held_out.append(text[cut:])
        paths = self.out / "training.txt", self.out / "held-out.txt"
        sizes = []
        for path, parts in zip(paths, (training, held_out)):
            data = "".join(parts).encode()
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
            sizes.append(len(data))
        # Half a byte more, since the command rounds down.
        return *paths, (sizes[1] + 0.5) / sum(sizes)

    def device(self):
        return [] if self.options.device == "cpu" else ["--device", self.options.device]

    def evaluate(self, step, model):
        window = self.options.window
        # A step that overlaps gives every token at least half a window before it.
        command = ["eval", model, "--text", self.out / "held-out.txt", "--window", window, "--stride", window // 2]
        lane = "cpu" if self.options.device == "cpu" else "device"
        return self.run(f"eval-{step}", lane, [*command, *self.device()])["perplexity"]

    def train(self, step, settings):
        folder = self.out / "runs" / step
        folder.parent.mkdir(exist_ok=True)
        command = ["train", self.options.recipe, "-o", folder, *self.device()]
        for pair in self.options.set:
            command += ["--set", pair]
        # Later ones last: what a step is about is not overridden.
        for key, value in settings.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        report = self.run(f"train-{step}", "cpu" if self.options.device == "cpu" else "device", command)
        return folder / "model", report

    def quantized(self, step, model, results):
        """Perplexities of a 2:4 model in integers."""
        for integers in INTEGERS:
            name = f"{step}-{integers}"
            to = self.out / "models" / name
            self.run(f"quantize-{name}", "cpu", ["quantize", model, "-o", to, "--force", "--dtype", integers])
            results[integers] = self.evaluate(name, to)

    def calibration(self, training):
        options = self.options
        return [
            "--calibration",
            training,
            "--samples",
            options.samples,
            "--length",
            options.length,
            "--seed",
            options.seed,
            # The methods are compared, not what follows them.
            "--tune",
            "0",
        ]

    def tune(self, name, start, method, share):
        """Goes on training a model for a few steps, at a lower learning rate."""
        settings = {
            **self.settings(share),
            "model.from": str(start.resolve()),
            "data.tokenizer": "bytes",
            "sparsity.method": method,
            "training.steps": self.options.tune_steps,
            "training.learning_rate": self.options.tune_rate,
            "training.final_learning_rate": self.options.tune_rate / 10,
            "training.warm_up": min(10, self.options.tune_steps),
            "training.checkpoint_every": 0,
            "training.validate_every": 0,
        }
        return self.train(f"{name}-tuned", settings)

    def dense_tuned(self, dense, share):
        """The dense model after as many further steps as the pruned ones get."""
        return self.evaluate("dense-tuned", self.tune("dense", dense, "dense", share)[0])

    def joint(self, integers, dense, training):
        """SparseGPT, and rounding for the outputs behind it."""
        name = f"sparsegpt-joint-{integers}"
        to = self.out / "models" / name
        self.run(
            f"prune-{name}",
            "cpu",
            [
                "prune",
                dense,
                "-o",
                to,
                "--force",
                "--method",
                "sparsegpt",
                *self.calibration(training),
                "--quantize",
                integers,
            ],
        )
        return self.evaluate(name, to)

    def method(self, method, dense, training, share):
        """Everything about one method."""
        models = self.out / "models"
        calibration = self.calibration(training) if method != "magnitude" else []
        pruned, results = models / method, {"pruned": {}, "tuned": {}}
        report = self.run(
            f"prune-{method}", "cpu", ["prune", dense, "-o", pruned, "--force", "--method", method, *calibration]
        )
        errors = [tensor["relative_error"] for tensor in report["tensors"] if tensor.get("relative_error") is not None]
        if errors:
            results["relative_error"] = sum(errors) / len(errors)
        kept = [tensor["kept_l2"] for tensor in report["tensors"] if tensor.get("kept_l2") is not None]
        results["kept_l2"] = sum(kept) / len(kept)
        results["pruned"]["bf16"] = self.evaluate(method, pruned)
        tuned, report = self.tune(method, pruned, "fixed", share)
        results["tune_seconds"] = report["seconds"]
        results["tuned"]["bf16"] = self.evaluate(f"{method}-tuned", tuned)
        self.quantized(method, pruned, results["pruned"])
        self.quantized(f"{method}-tuned", tuned, results["tuned"])
        return method, results

    def settings(self, share):
        texts = [str((self.out / name).resolve()) for name in ("training.txt", "held-out.txt")]
        return {"data.text": texts, "data.validation": share, "training.seed": self.options.seed}

    def study(self):
        training, _, share = self.texts()
        dense, report = self.train("dense", self.settings(share))
        (self.out / "models").mkdir(exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            begun = {
                "dense": pool.submit(self.evaluate, "dense", dense),
                "dense tuned": pool.submit(self.dense_tuned, dense, share),
                **{f"joint {integers}": pool.submit(self.joint, integers, dense, training) for integers in INTEGERS},
                **{method: pool.submit(self.method, method, dense, training, share) for method in METHODS},
            }
            # An error is told when everything that can go on has ended.
            results = {name: done.exception() or done.result() for name, done in begun.items()}
        for failed in (result for result in results.values() if isinstance(result, BaseException)):
            raise SystemExit(str(failed))
        methods = dict(results[method] for method in METHODS)
        methods["sparsegpt"]["joint"] = {integers: results[f"joint {integers}"] for integers in INTEGERS}
        options = self.options
        plan = report["plan"]
        study = {
            "texts": [path.name for path in options.text],
            "held_out_bytes": (self.out / "held-out.txt").stat().st_size,
            "model": {
                "parameters": plan["parameters"],
                "sizes": {k: v for k, v in report["recipe"]["model"].items() if k != "from"},
            },
            "training": {key: report["recipe"]["training"][key] for key in ("steps", "batch", "learning_rate", "seed")},
            "training_seconds": report["seconds"],
            "tokens": report["tokens"],
            "tune": {"steps": options.tune_steps, "learning_rate": options.tune_rate},
            "calibration": {"samples": options.samples, "length": options.length, "seed": options.seed},
            "window": options.window,
            "stride": options.window // 2,
            "device": options.device,
            "machine": report["machine"],
            "version": report["version"],
            "dense": results["dense"],
            "dense_tuned": results["dense tuned"],
            "methods": methods,
        }
        (self.out / "study.json").write_text(json.dumps(study, indent=1) + "\n")
        return study


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--twofour", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument(
        "--recipe", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2] / "recipes/decoder-25m.toml"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tune-steps", type=int, default=150)
    parser.add_argument("--tune-rate", type=float, default=3e-4)
    parser.add_argument("--samples", type=int, default=64, help="of calibration")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument(
        "--window", type=int, default=512, help="tokens of a window of evaluation; the stride is half of it"
    )
    parser.add_argument("--device-jobs", type=int, default=2)
    parser.add_argument("--cpu-jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=86400, help="seconds, after which no step begins")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of every training run's recipe"
    )
    options = parser.parse_args()
    study = Study(options).study()
    print(f"dense {study['dense']:.4f}")
    for method, results in study["methods"].items():
        print(f"{method}: {json.dumps(results)}")


if __name__ == "__main__":
    main()
