"""Recovery of a pruned decoder from its dense model, in one command:

    python3 bench/studies/recovery.py --twofour target/release/twofour --dense dense/ --pruned pruned/ \
        --text valid.txt --text written.txt --test test.txt --sparsegpt 41.18 --run runs/recovered -o recovery.json

Trains by `recipes/recover.toml` with the given `--set`s, in the folder `--run`, and measures the perplexity of each
`--test` with the dense, the pruned and the recovered model, in windows of `--window` tokens. The same command again
goes on where the run was stopped: `--seconds` stops it after so long. `-o` has a row for each test: perplexities,
minutes of training, tokens a second, and the gap, (recovered - dense) / (SparseGPT - dense), where `--sparsegpt` says
what SparseGPT's perplexity is, once for each test.
"""

import argparse
import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def perplexity(own, model, test):
    command = [own.twofour, "eval", model, "--text", test, "--window", str(own.window), "--device", own.device, "--json"]
    if own.dtype:
        command += ["--dtype", own.dtype]
    found = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, check=True, text=True).stdout
    return json.loads(found)["perplexity"]


def train(own):
    """The command, whether the run is finished, and seconds with those of loading."""
    sets = [f"model.from={own.pruned}", f"distillation.teacher={own.dense}", f"data.text={json.dumps(own.text)}", *own.set]
    command = [own.twofour, "train", ROOT / "recipes/recover.toml", "-o", own.run, "--device", own.device]
    command = [str(word) for word in command] + [word for pair in sets for word in ("--set", pair)]
    begin = time.monotonic()
    process = subprocess.Popen(command)
    try:
        status = process.wait(own.seconds)
    except subprocess.TimeoutExpired:
        # It saves a checkpoint and ends.
        process.send_signal(signal.SIGINT)
        status = process.wait()
    report = pathlib.Path(own.run) / "report.json"
    if status and not report.exists():
        print(f"not finished (status {status}); the same command goes on", file=sys.stderr)
    return command, report.exists(), time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--twofour", default="twofour")
    parser.add_argument("--dense", required=True)
    parser.add_argument("--pruned", required=True)
    parser.add_argument("--text", action="append", required=True, help="text to train on; may be given several times")
    parser.add_argument("--test", action="append", required=True, help="text to judge by; may be given several times")
    parser.add_argument("--sparsegpt", action="append", type=float, help="SparseGPT's perplexity of each test")
    parser.add_argument("--run", required=True, help="folder of the run")
    parser.add_argument("--set", action="append", default=[], help="value of the recipe; may be given several times")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", help="what perplexity is computed in")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--seconds", type=float, help="stop after so long; the same command goes on")
    parser.add_argument("-o", "--output", required=True)
    own = parser.parse_args()
    if own.sparsegpt and len(own.sparsegpt) != len(own.test):
        parser.error("--sparsegpt is given once for each --test")
    command, is_finished, seconds = train(own)
    steps = [json.loads(line) for line in (pathlib.Path(own.run) / "metrics.jsonl").read_text().splitlines()]
    tokens = sorted(step["tokens_per_s"] for step in steps)[len(steps) // 2]
    figures = {
        "command": shlex.join(command),
        "device": own.device,
        "steps": len(steps),
        "seconds_of_last_call": seconds,
        "tokens_per_s": tokens,
        "loss": [step["loss"] for step in steps[:: max(1, len(steps) // 100)]],
        "val_loss": [[step["step"], step["val_loss"]] for step in steps if step.get("val_loss") is not None],
        "rows": [],
    }
    # A run that was stopped is judged by its last checkpoint.
    recovered = own.run if is_finished else pathlib.Path(own.run) / "last"
    for index, test in enumerate(own.test):
        dense, pruned, after = (perplexity(own, model, test) for model in (own.dense, own.pruned, recovered))
        row = {"test": test, "dense": dense, "pruned": pruned, "perplexity": after}
        if own.sparsegpt:
            row["gap"] = (after - dense) / (own.sparsegpt[index] - dense)
        figures["rows"].append(row)
        print(json.dumps(row), flush=True)
    pathlib.Path(own.output).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
