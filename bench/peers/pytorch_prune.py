#!/usr/bin/env python3
"""Device time of torch's pruning and compressing both ways (torch._sparse_semi_structured_tile), bf16, on the first
GPU.

    python bench/peers/pytorch_prune.py [--rounds 30]

Prints one JSON object. Events around each call, 256 MiB read before it so that the second-level cache is cold, medians.
The other side: twofour-bench cuda prune.
"""

import argparse
import json
import statistics

import torch

SHAPES = [(4096, 14336), (14336, 4096), (8192, 8192), (1024, 4096), (4096, 1024)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    flush = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rows = []
    for shape in SHAPES:
        weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        times = []
        for i in range(rounds + 3):
            flush.amax()
            begun.record()
            torch._sparse_semi_structured_tile(weight, "largest_abs_values_greedy", True)
            ended.record()
            ended.synchronize()
            if i >= 3:
                times.append(begun.elapsed_time(ended) * 1e3)
        us = statistics.median(times)
        rows.append(
            {
                "dtype": "bf16",
                "shape": list(shape),
                "contender": "torch",
                "kernel": "greedy",
                "us": us,
                "min_us": min(times),
                "max_us": max(times),
                "gb_per_s": 4.25 * shape[0] * shape[1] / us * 1e-3,
            }
        )
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


main()
