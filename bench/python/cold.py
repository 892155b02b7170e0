"""What the first calls of a process take on a GPU, where no kernel is compiled yet: packing and products of a model of
seven shapes, planned by ``twofour.warm``, and the first training step.

    TWOFOUR_CACHE=$(mktemp -d) python bench/python/cold.py [-o FILE]

Seconds. ``TWOFOUR_CACHE`` names an empty folder, since compiled kernels are kept.
"""

import argparse
import json
import pathlib
import time

import torch
from torch import nn

import twofour
from twofour.sparsity.training import SemiSparseLinear

#: Rows and columns of Llama 3 8B, of its attention and MLP as one weight each, and of a head.
SHAPES = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (6144, 4096), (28672, 4096), (32000, 4096)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def timed(name: str, found: dict, call):
    """What a call returns; its seconds are kept and printed."""
    begun = time.perf_counter()
    result = call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    found[name] = time.perf_counter() - begun
    print(f"{name}: {found[name]:.2f} s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=pathlib.Path, help="write JSON to this file")
    arguments = parser.parse_args()
    shapes = SHAPES if DEVICE == "cuda" else [(rows // 64, cols // 64) for rows, cols in SHAPES]
    dense = [nn.Linear(cols, rows, bias=False, device=DEVICE, dtype=torch.bfloat16) for rows, cols in shapes]
    x = torch.zeros(512, dense[0].in_features, device=DEVICE, dtype=torch.bfloat16)
    dense[0](x)
    found: dict[str, float] = {}
    begun = time.perf_counter()
    layers = [timed("first from_dense", found, lambda: twofour.Linear.from_dense(dense[0], prune=True))]
    rest = timed("six more", found, lambda: [twofour.Linear.from_dense(each, prune=True) for each in dense[1:]])
    model = nn.ModuleList(layers + rest)
    timed("warm for 1 token", found, lambda: twofour.warm(model, [1]))
    timed("warm for 512 tokens", found, lambda: twofour.warm(model, [512]))
    found["all of inference"] = time.perf_counter() - begun
    int4 = timed("first Int4Linear.from_dense", found, lambda: twofour.Int4Linear.from_dense(dense[0], prune=True))
    timed("its first product of 1 token", found, lambda: int4(x[:1]))
    timed("its first product of 512 tokens", found, lambda: int4(x))
    training = SemiSparseLinear.from_dense(
        nn.Linear(dense[0].in_features, 1024, device=DEVICE), algo="largest_abs_values_greedy"
    )

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):
            training(x.float().requires_grad_()).float().sum().backward()

    timed("first training step", found, step)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        machine = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
        arguments.output.write_text(json.dumps({"machine": machine, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
