#!/usr/bin/env python3
"""Every strategy of docs/how-to/strategies.md from one dense decoder, with one budget of training: perplexity of text
that nothing else sees. Runs the `twofour` command.

    python3 bench/studies/strategies.py OUT --twofour target/release/twofour --text FILE... --held-out FILE
        [--dense MODEL] [--only NAME...] [--device cuda] [--steps 300] [--batch 16] [--context 512] [--rate 3e-4]
        [--seed 0] [--samples 64] [--window 512] [--limit SECONDS]

Without --dense a decoder of 25 M parameters trains on the texts first, by `recipes/decoder-25m.toml`. All linear layers
of its blocks become 2:4, which `twofour check` confirms of every result. Strategies with `prune` take it before the
budget, and no text but --text for calibration. OUT/strategies.json has the rows; the same command goes on with what is
missing.
"""

import argparse
import json
import pathlib

from steps import Steps

RECIPES = pathlib.Path(__file__).resolve().parents[2] / "recipes"
ALL = {"sparsity.layers": ["blocks.*.attn.*", "blocks.*.mlp.*"]}


def layer_by_layer(blocks):
    """Settings by which one block after the other becomes 2:4, the last first, within the first half of all steps."""
    parts = [
        f'{{ layers = ["blocks.{block}.attn.*", "blocks.{block}.mlp.*"], '
        f"begin = {0.5 * (blocks - block) / blocks:.3f} }}"
        for block in range(blocks)
    ]
    return {"sparsity.override": f"[{', '.join(parts)}]"}


#: Name: how the dense model is pruned first, the recipe that trains, and settings beside the budget's, or a function
#: that makes them for a number of blocks.
STRATEGIES = {
    "dense, trained on": (None, "fine-tune", {"sparsity.method": "dense"}),
    "zero-shot, magnitude": (["--method", "magnitude"], None, {}),
    "zero-shot, layer by layer": (["--tune", "0"], None, {}),
    "zero-shot, block by block": ([], None, {}),
    "one-shot, magnitude": (["--method", "magnitude"], "fine-tune", {}),
    "one-shot": ([], "fine-tune", {}),
    "one-shot within the run": (None, "one-shot", {**ALL, "sparsity.begin": 0.1}),
    "iterative, four levels": (None, "iterative", ALL),
    "iterative, 3:4 then 2:4": (None, "gradual", ALL),
    "iterative, a level that rises": (None, "sparsifier", ALL),
    "iterative, block by block": (None, "layer-by-layer", layer_by_layer),
    "pruning-aware, STE": (None, "ste", ALL),
    "pruning-aware, SR-STE": (None, "sr-ste", ALL),
    # Without the dense steps that end it.
    "pruning-aware, FST": (None, "fst", {**ALL, "sparsity.end": 1.0}),
    "pruning-aware, S-STE": (None, "s-ste", ALL),
    "pruning-aware, STEP": (None, "step", ALL),
    "pruning-aware, AdamS": (None, "ste", {**ALL, "sparsity.method": "adams"}),
    "several masks, learned": (["--permute", "off"], "learned-masks", {**ALL, "distillation.teacher": "dense"}),
    "reconstruction of all blocks": ([], "reconstruct", {"distillation.teacher": "dense"}),
    "distillation": ([], "recover", {"distillation.teacher": "dense"}),
}


def toml(value):
    """A value of `--set`: a string that has TOML's form already stays."""
    return value if isinstance(value, str) and value[:1] == "[" else json.dumps(value)


class Study:
    def __init__(self, options):
        self.options = options
        self.out = options.out
        self.run = Steps(self.out, options.twofour, options.limit).run
        self.lane = "cpu" if options.device == "cpu" else "device"
        self.on_device = ["--device", options.device]

    def train(self, step, recipe, settings):
        folder = self.out / "runs" / step
        folder.parent.mkdir(exist_ok=True)
        command = ["train", RECIPES / f"{recipe}.toml", "-o", folder, *self.on_device]
        common = {
            "data.text": [str(path.resolve()) for path in self.options.text],
            "data.validation": 0.01,
            "training.seed": self.options.seed,
            "training.validate_every": 0,
            "training.checkpoint_every": 0,
        }
        for key, value in {**common, **settings}.items():
            command += ["--set", f"{key}={toml(value)}"]
        return folder / "model", self.run(f"train-{step}", self.lane, command)

    def dense(self):
        if self.options.dense:
            return self.options.dense
        return self.train("dense", "decoder-25m", {})[0]

    def pruned(self, how, dense):
        """The dense model after `prune`; strategies that prune alike share it."""
        name = "-".join(word.lstrip("-") for word in how) or "default"
        to = self.out / "models" / name
        to.parent.mkdir(exist_ok=True)
        options = self.options
        command = ["prune", dense, "-o", to, "--force", *how]
        if "magnitude" not in how:
            command += ["--calibration", options.text[0], "--samples", options.samples, "--length", options.context]
            command += ["--seed", options.seed, *self.on_device]
        self.run(f"prune-{name}", self.lane, command)
        return to

    def evaluate(self, step, model):
        command = ["eval", model, "--text", self.options.held_out, "--window", self.options.window, *self.on_device]
        return self.run(f"eval-{step}", self.lane, command)["perplexity"]

    def row(self, name, dense, blocks):
        how, recipe, settings = STRATEGIES[name]
        step = name.replace(",", "").replace(":", "-").replace(" ", "-")
        model, report = dense if how is None else self.pruned(how, dense), None
        if recipe:
            settings = settings(blocks) if callable(settings) else dict(settings)
            if "distillation.teacher" in settings:
                settings["distillation.teacher"] = str(dense.resolve())
            rate = self.options.rate
            budget = {
                "model.from": str(model.resolve()),
                "model.context": self.options.context,
                "training.steps": self.options.steps,
                "training.batch": self.options.batch,
                "training.learning_rate": rate,
                "training.final_learning_rate": rate / 10,
                "training.warm_up": max(1, self.options.steps // 20),
                "training.weight_decay": 0.0,
            }
            model, report = self.train(step, recipe, {**budget, **settings})
        sparse = not name.startswith("dense")
        if sparse:
            self.run(f"check-{step}", "cpu", ["check", model])
        return {
            "strategy": name,
            "prune": None if how is None else " ".join(how),
            "recipe": recipe,
            "steps": self.options.steps if recipe else 0,
            "seconds": report["seconds"] if report else 0,
            "perplexity": self.evaluate(step, model),
            "two_of_four": sparse,
        }

    def study(self):
        options = self.options
        dense = self.dense()
        before = self.evaluate("dense", dense)
        blocks = json.loads((dense / "config.json").read_text())["num_hidden_layers"]
        rows, failed = [], []
        for name in options.only or STRATEGIES:
            try:
                rows.append(self.row(name, dense, blocks))
            except (RuntimeError, TimeoutError) as error:
                failed.append(str(error))
                continue
            found = {
                "model": options.name or dense.name,
                "dense": before,
                "text": [path.name for path in options.text],
                "held_out": options.held_out.name,
                "budget": {
                    key: getattr(options, key) for key in ("steps", "batch", "context", "rate", "samples", "seed")
                },
                "window": options.window,
                "device": options.device_name or options.device,
                "rows": rows,
            }
            (self.out / "strategies.json").write_text(json.dumps(found, indent=1) + "\n")
        if failed:
            raise SystemExit("\n".join(failed))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--twofour", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, nargs="+", required=True, help="text to train and calibrate on")
    parser.add_argument("--held-out", type=pathlib.Path, required=True, help="text to judge by")
    parser.add_argument("--dense", type=pathlib.Path, help="the model; one of 25 M parameters is trained unless told")
    parser.add_argument("--name", help="the model's, in the result; its folder's unless told")
    parser.add_argument("--only", nargs="+", choices=STRATEGIES, metavar="NAME")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--device-name", help="what the result says it ran on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=3e-4, help="the highest learning rate; the last is a tenth")
    parser.add_argument("--samples", type=int, default=64, help="sequences of calibration")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window of evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=86400, help="seconds, after which no step begins")
    Study(parser.parse_args()).study()


if __name__ == "__main__":
    main()
