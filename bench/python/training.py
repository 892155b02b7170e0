"""Training steps of a GPT of four blocks in PyTorch, MLPs dense or 2:4 in every forward pass, eager and compiled:
bfloat16 autocast over float32, fused AdamW.

    python bench/python/training.py --sizes 768x4x1024 2048x4x2048 [--paths compile eager] [--profile] -o FILE

A size is width x batch x tokens. Contenders live in one process and take turns; a figure is the median over rounds.
FILE gets a list of rows ``{model, path, batch, tokens, dense_ms, ours_ms, dense_bytes, ours_bytes, form, speedup}``, to
which a further run adds. ``--profile`` prints the kernels of a step of each contender. On a CPU: ``--sizes 64x2x16``.
"""

import argparse
import gc
import json
import pathlib
import random
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from twofour.sparsity.training import SemiSparseLinear, swap_linear_with_semi_sparse_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, STEPS = 4, 3


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def stepper(width: int, batch: int, tokens: int, sparse: bool, path: str):
    """A function that trains for a few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(BLOCKS))).to(DEVICE)
    if sparse:
        names = {name: SemiSparseLinear for name, _ in model.named_modules() if name.endswith((".up", ".down"))}
        swap_linear_with_semi_sparse_linear(model, names, algo="largest_abs_values_greedy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if path == "compile" else model
    x = torch.randn(batch, tokens, width, device=DEVICE)

    def steps():
        for _ in range(STEPS):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = forward(x).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return steps


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def profiled(steps, name: str) -> None:
    """Prints the kernels of a call, and the host's and the device's time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        steps()
        synchronize()
    by = "self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    print(name)
    print(profile.key_averages().table(sort_by=by, row_limit=22, max_name_column_width=70), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["1024x8x1024"])
    parser.add_argument("--paths", nargs="+", choices=("compile", "eager"), default=["compile"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("-o", "--output", type=pathlib.Path, help="adds rows to this file")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    started = time.perf_counter()
    rows = json.loads(arguments.output.read_text()) if arguments.output and arguments.output.exists() else []
    for path in arguments.paths:
        for size in arguments.sizes:
            width, batch, tokens = map(int, size.split("x"))
            torch._dynamo.reset()
            times, used, contenders = {}, {}, {}
            for name in ("dense", "SemiSparseLinear"):
                contenders[name] = stepper(width, batch, tokens, name != "dense", path)
                contenders[name]()
                if DEVICE == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                contenders[name]()
                used[name] = torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else None
                if arguments.profile:
                    profiled(contenders[name], f"{path} {size} {name}")
                times[name] = []
            for _ in range(arguments.rounds):
                for name in random.sample(list(contenders), 2):
                    synchronize()
                    begun = time.perf_counter()
                    contenders[name]()
                    synchronize()
                    times[name].append((time.perf_counter() - begun) / STEPS * 1e3)
            dense, ours = (statistics.median(times[name]) for name in ("dense", "SemiSparseLinear"))
            rows.append(
                {
                    "model": f"gpt-{BLOCKS}-blocks-{width}",
                    "path": path,
                    "batch": batch,
                    "tokens": tokens,
                    "dense_ms": dense,
                    "ours_ms": ours,
                    "dense_bytes": used["dense"],
                    "ours_bytes": used["SemiSparseLinear"],
                    "form": "SemiSparseLinear",
                    "speedup": dense / ours,
                }
            )
            took = time.perf_counter() - started
            speedup = f"dense {dense:.2f} ms, 2:4 {ours:.2f} ms, {dense / ours:.3f}x"
            print(f"{path} {size}: {speedup}, after {took:.0f} s", flush=True)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
            contenders.clear()
            gc.collect()


if __name__ == "__main__":
    main()
