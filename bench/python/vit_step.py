"""A training step of ViT-L with torch.compile: dense, and with the MLPs' linear layers swapped for SemiSparseLinear,
interleaved.

    python bench/python/vit_step.py [-o FILE] [--rounds N] [--profile] [--tiny]

Masks are chosen anew in every step, in both layers of each MLP. bfloat16 autocast over float32 parameters, fused AdamW.
Two sizes: 32 images of 257 tokens, 8 of 1626. A figure is the median of the rounds' medians. Peak memory is torch's, of
each model alone. ``--profile`` prints where each step's time goes.
"""

import argparse
import json
import pathlib
import random
import statistics

import torch
import torch.nn.functional as F
from torch import nn

import twofour
from twofour.sparsity.training import SemiSparseLinear, swap_linear_with_semi_sparse_linear

CLASSES, PATCH = 1000, 588


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vit(nn.Module):
    """A vision transformer over patches that are cut already."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, tokens: int):
        super().__init__()
        self.embed = nn.Linear(PATCH, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        x = self.embed(patches) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def mlps(model: nn.Module) -> dict:
    """The layers that are swapped."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {name: SemiSparseLinear for name in names if name.endswith((".up", ".down"))}


class Contender:
    """A model, its optimizer, and its step."""

    def __init__(self, sparse: bool, compiled: bool, size: tuple, batch: int, tokens: int, device: str):
        torch.manual_seed(0)
        self.before = torch.cuda.memory_allocated() if device == "cuda" else 0
        self.model = Vit(*size, tokens).to(device)
        if sparse:
            swap_linear_with_semi_sparse_linear(self.model, mlps(self.model))
        self.forward = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.patches = torch.randn(batch, tokens, PATCH, device=device)
        self.labels = torch.randint(0, CLASSES, (batch,), device=device)
        self.device = device
        self.peak = 0

    def step(self) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = F.cross_entropy(self.forward(self.patches).float(), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def measure_peak(self) -> None:
        """Measures the peak memory of a step, of this contender alone: before another one is made. Those made earlier
        do not count.
        """
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated() - self.before

    def timed(self, steps: int) -> list:
        """Milliseconds of steps."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def print_profile(name: str, contender: Contender) -> None:
    """Prints the kernels of a step: total milliseconds, launches, and names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        contender.step()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    print(f"{name}: {sum(kernel.self_device_time_total for kernel in kernels) / 1e3:.2f} ms in kernels")
    for kernel in kernels[:45]:
        print(f"{kernel.self_device_time_total / 1e3:9.3f} ms {kernel.count:5}  {kernel.key[:110]}")


def measure(batch: int, tokens: int, rounds: int, profile: bool) -> dict:
    size = (24, 1024, 16, 4096)
    torch._dynamo.reset()
    contenders = {}
    for name, sparse in (("dense", False), ("2:4", True)):
        contenders[name] = Contender(sparse, True, size, batch, tokens, "cuda")
        for _ in range(5):
            contenders[name].step()
        contenders[name].measure_peak()
    times = {name: [] for name in contenders}
    losses = {}
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            times[name].append(statistics.median(contenders[name].timed(10)))
            losses[name] = contenders[name].step().item()
    explained = torch._dynamo.utils.counters["graph_break"]
    if profile:
        for name, contender in contenders.items():
            print_profile(name, contender)
    return {
        name: {
            "ms": statistics.median(times[name]),
            "min_ms": min(times[name]),
            "peak_bytes": contenders[name].peak,
            "loss": losses[name],
        }
        for name in contenders
    } | {"graph_breaks": sum(explained.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--tiny", action="store_true", help="one step of a tiny model on a CPU: that the program runs, no figures"
    )
    arguments = parser.parse_args()
    if arguments.tiny:
        losses = [Contender(sparse, False, (1, 64, 4, 128), 2, 16, "cpu").step().item() for sparse in (False, True)]
        print("losses of a dense and of a 2:4 step:", losses)
        return
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark requires a GPU; --tiny shows that it runs")
    torch.set_float32_matmul_precision("high")
    record = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "twofour": twofour.__version__,
        "results": {},
    }
    for batch, tokens in ((32, 257), (8, 1626)):
        found = measure(batch, tokens, arguments.rounds, arguments.profile)
        record["results"][f"ViT-L, {batch}x{tokens}"] = found
        print(f"{batch}x{tokens}: {found['dense']['ms'] / found['2:4']['ms']:.3f}x", found, flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
