"""Linear layers on a CPU by the number of threads: ``nn.Linear`` and ``twofour.Linear``, interleaved.

    python bench/python/threads.py [-o FILE] [--threads 1,4,8,16] [--rounds N] [--quick]

Shapes are those of models of 1 to 7 billion parameters, in float32 and bfloat16, with 1 to 256 tokens. Between two
calls of a layer, copies of it are called, more than caches hold. Contenders take turns in shuffled order; a figure is
the median over rounds of the time of a call.
"""

import argparse
import copy
import json
import os
import pathlib
import random
import statistics
import time

import torch

import twofour

THREADS = (1, 4, 8, 16)
SHAPES = ((8192, 2048), (2048, 8192), (4096, 4096))
TOKENS = (1, 8, 64, 256)
#: Bytes of the smaller contender's copies.
COPIES = 700 << 20
#: Microseconds of a contender's turn, if a call takes no longer.
TURN = 3e4


class Contender:
    """Copies of a layer, called one after another."""

    def __init__(self, layers: list):
        self.layers = layers
        self.next = 0

    def turn(self, x: torch.Tensor, calls: int) -> float:
        """Microseconds of a call."""
        count = len(self.layers)
        begun = time.perf_counter()
        for index in range(self.next, self.next + calls):
            self.layers[index % count](x)
        us = (time.perf_counter() - begun) / calls * 1e6
        self.next = (self.next + calls) % count
        return us


def contenders(rows: int, cols: int, dtype: torch.dtype, size: int) -> dict:
    # A little more than half of the dense weight is stored.
    copies = max(2, -(-2 * size // (rows * cols * dtype.itemsize)))
    layer = torch.nn.Linear(cols, rows, bias=False, dtype=dtype)
    dense = [copy.deepcopy(layer) for _ in range(copies)]
    ours = [twofour.Linear.from_dense(layer, prune=True) for layer in dense]
    return {"dense": Contender(dense), "ours": Contender(ours)}


def measure(found: dict, x: torch.Tensor, rounds: int) -> dict:
    """Medians in microseconds, by name."""
    calls = {}
    for name, contender in found.items():
        contender.turn(x, 2)
        calls[name] = max(1, int(TURN / contender.turn(x, 2)))
    times = {name: [] for name in found}
    for _ in range(rounds):
        for name in random.sample(list(found), len(found)):
            times[name].append(found[name].turn(x, calls[name]))
    return {name: statistics.median(us) for name, us in times.items()}


def cpu_name() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=pathlib.Path, help="write JSON to this file")
    parser.add_argument("--threads", default=",".join(str(count) for count in THREADS if count <= cores))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one shape, two numbers of tokens, few copies")
    arguments = parser.parse_args()
    shapes, tokens, size = (SHAPES[:1], TOKENS[:2], 64 << 20) if arguments.quick else (SHAPES, TOKENS, COPIES)
    torch.manual_seed(0)
    random.seed(0)
    record = {
        "machine": cpu_name(),
        "hardware_threads": cores,
        "engine": twofour.engine(),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "twofour": twofour.__version__,
        "rounds": arguments.rounds,
        "rows": [],
    }
    for dtype in (torch.float32, torch.bfloat16):
        for rows, cols in shapes:
            found = contenders(rows, cols, dtype, size)
            for threads in (int(count) for count in arguments.threads.split(",")):
                torch.set_num_threads(threads)
                for count in tokens:
                    with torch.inference_mode():
                        us = measure(found, torch.randn(count, cols, dtype=dtype), arguments.rounds)
                    row = {
                        "dtype": str(dtype).removeprefix("torch."),
                        "threads": threads,
                        "out_features": rows,
                        "in_features": cols,
                        "tokens": count,
                        "dense_us": us["dense"],
                        "ours_us": us["ours"],
                        "speedup": us["dense"] / us["ours"],
                    }
                    record["rows"].append(row)
                    name = f"{row['dtype']} [{rows}, {cols}], {threads} threads, {count} tokens"
                    figures = f"dense {us['dense']:.1f} us, ours {us['ours']:.1f} us"
                    print(f"{name:50} {row['speedup']:5.2f}x  {figures}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
