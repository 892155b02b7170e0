"""Pruning on a CPU and on a GPU: the same model, text and seed by both, `python3 bench/studies/pruning_device.py MODEL
--calibration TEXT --eval TEXT -o FILE [--block target/release/examples/solve_block]`.

Runs `twofour prune` with --device cpu and --device cuda, measures both outputs with `twofour eval --device cuda`, and
compares time, the errors of layers and perplexities. With --block, the example of crate twofour-cuda, it also times
the solves of a block of LLaMA-7B's shapes on the GPU. `--only cuda` leaves out the CPU, which takes an hour for 0.5 B
with two cores.
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import time

DEVICES = ("cuda", "cpu")


def answer(command):
    begin = time.monotonic()
    found = subprocess.run([*map(str, command), "--json"], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(found), time.monotonic() - begin


def pruned(options, device, folder):
    output = folder / device
    command = [options.twofour, "prune", options.model, "-o", output, "--calibration", options.calibration]
    command += ["--samples", options.samples, "--length", options.length, "--device", device, "--tune", "0", *options.prune]
    found, seconds = answer(command)
    errors = [tensor["relative_error"] for tensor in found["tensors"] if tensor.get("relative_error") is not None]
    measured, _ = answer([options.twofour, "eval", output, "--text", options.eval, "--device", "cuda"])
    return {
        "device": found["device"],
        "command": " ".join(map(str, command[1:])),
        "minutes": seconds / 60,
        "layers": len(errors),
        "mean_relative_error": sum(errors) / len(errors),
        "perplexity": measured["perplexity"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--twofour", default="target/release/twofour")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--only", choices=DEVICES)
    parser.add_argument("--block", help="the built example solve_block")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("prune", nargs="*", help="more arguments of `twofour prune`, after --")
    options = parser.parse_args()
    result = {"model": options.model, "cores": os.cpu_count(), "rows": []}

    def write():
        pathlib.Path(options.output).write_text(json.dumps(result, indent=2) + "\n")

    if options.block:
        # [hidden, intermediate] of LLaMA-7B.
        found = subprocess.run([options.block, "4096", "11008"], check=True, stdout=subprocess.PIPE).stdout
        result["block_of_7b"] = json.loads(found)
        print(result["block_of_7b"], flush=True)
        write()
    with tempfile.TemporaryDirectory(dir=pathlib.Path(options.output).resolve().parent) as folder:
        for device in (options.only,) if options.only else DEVICES:
            row = pruned(options, device, pathlib.Path(folder))
            result["rows"].append(row)
            print(row, flush=True)
            write()
    if len(result["rows"]) == 2:
        gpu, cpu = result["rows"]
        times, share = cpu["minutes"] / gpu["minutes"], gpu["perplexity"] / cpu["perplexity"]
        print(f"{times:.1f} times as fast, {share:.4f} of the perplexity")


main()
