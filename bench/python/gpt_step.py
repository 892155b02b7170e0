"""A training step of a GPT at GPT-2 774M's sizes in PyTorch, eager and with torch.compile, interleaved: the other side
of `twofour-bench cuda step`.

    python bench/python/gpt_step.py [-o FILE] [--layers 12 36] [--precision autocast bf16] [--rounds N] [--profile]
        [--tiny]

The model is that of twofour_nn::model::Gpt: byte embedding, pre-norm causal attention with rotary positions, pre-norm
feed-forward with exact GELU, final norm, untied head; cross-entropy, gradients clipped to norm 1, fused AdamW with
decay for matrices. Attention is scaled_dot_product_attention.

Precisions: ``autocast`` is bfloat16 autocast over float32 parameters, whose gradients and moments are float32 too
(twofour's step has the same types); ``bf16`` is bfloat16 parameters, gradients and moments without a float32 master
(less memory traffic, and not the same training).

Milliseconds are of the host, which waits for the loss after each step, as twofour's trainer does; the median over
rounds.
"""

import argparse
import json
import pathlib
import random
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)

        def rotated(a: torch.Tensor) -> torch.Tensor:
            low, high = a.chunk(2, -1)
            return a * cos + torch.cat((-high, low), -1) * sin

        attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A byte-level GPT."""

    def __init__(self, layers: int, width: int, heads: int, context: int, hidden: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        half = width // heads // 2
        angle = torch.arange(context)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Contender:
    """A model, its optimizer, and its step."""

    def __init__(self, compiled: bool, precision: str, sizes: dict, batch: int, device: str):
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        self.device, self.autocast, self.before = device, precision == "autocast", before
        self.model = Gpt(**sizes).to(device, torch.float32 if self.autocast else torch.bfloat16)
        self.forward = torch.compile(self.model) if compiled else self.model
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=device == "cuda")
        self.batch, self.context = batch, sizes["context"]
        self.text = torch.randint(0, VOCABULARY, (1 << 20,))
        self.times, self.phases, self.peak, self.loss = [], [], 0, float("nan")

    def sample(self) -> torch.Tensor:
        at = torch.randint(0, len(self.text) - self.context - 1, (self.batch,))
        return torch.stack([self.text[i : i + self.context + 1] for i in at]).to(self.device)

    def step(self, marks: list | None = None) -> None:
        """A step; with events in ``marks`` they are recorded where phases begin and end."""
        mark = (lambda i: marks[i].record()) if marks else (lambda i: None)
        ids = self.sample()
        mark(0)
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.forward(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].reshape(-1))
        mark(1)
        loss.backward()
        mark(2)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark(3)
        self.loss = loss.item()

    def timed(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        self.step()
        torch.cuda.synchronize()
        self.times.append((time.perf_counter() - begun) * 1e3)
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())

    def phased(self) -> None:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self.step(marks)
        torch.cuda.synchronize()
        self.phases.append([a.elapsed_time(b) for a, b in zip(marks, marks[1:])])

    def row(self, name: str, precision: str, sizes: dict, interleaved: bool) -> dict:
        times = sorted(self.times)
        ms = statistics.median(times)
        phases = [statistics.median(column) for column in zip(*self.phases)]
        return {
            "dtype": precision,
            "model": [sizes[key] for key in ("layers", "width", "heads", "context", "hidden")],
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "batch": self.batch,
            "contender": name,
            "interleaved": interleaved,
            "ms": ms,
            "p90_ms": times[round((len(times) - 1) * 0.9)],
            "min_ms": times[0],
            "tokens_per_s": self.batch * self.context / ms * 1e3,
            "bytes": self.peak,
            "phases": [{"phase": phase, "ms": ms} for phase, ms in zip(("forward", "backward", "update"), phases)],
            "loss": self.loss,
        }


def print_profile(name: str, contender: Contender) -> None:
    """Prints the kernels of a step: total milliseconds, launches, and names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        contender.step()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    print(f"{name}: {sum(kernel.self_device_time_total for kernel in kernels) / 1e3:.2f} ms in kernels")
    for kernel in kernels[:40]:
        print(f"{kernel.self_device_time_total / 1e3:9.3f} ms {kernel.count:5}  {kernel.key[:110]}")


def measure(sizes: dict, precision: str, batch: int, rounds: int, profile: bool) -> list:
    """Rows of both contenders, interleaved unless one alone takes more than two fifths of the memory."""
    torch._dynamo.reset()
    names = {"eager": False, "torch.compile": True}
    total = torch.cuda.get_device_properties(0).total_memory
    rows, held = [], {}
    for name, compiled in names.items():
        contender = held[name] = Contender(compiled, precision, sizes, batch, "cuda")
        for _ in range(4):
            contender.step()
        contender.timed()
        contender.times.clear()
        contender.peak -= contender.before
        alone = contender.peak > total * 0.4
        if alone:
            rows.append(finish(name, held.pop(name), precision, sizes, rounds, profile, False))
            del contender
            torch.cuda.empty_cache()
    if held:
        for _ in range(rounds):
            for name in random.sample(list(held), len(held)):
                peak = held[name].peak
                held[name].timed()
                held[name].peak = peak  # of the contender alone
        rows += [finish(name, contender, precision, sizes, 0, profile, True) for name, contender in held.items()]
    return rows


def finish(
    name: str, contender: Contender, precision: str, sizes: dict, rounds: int, profile: bool, interleaved: bool
) -> dict:
    for _ in range(rounds):
        peak = contender.peak
        contender.timed()
        contender.peak = peak
    for _ in range(5):
        contender.phased()
    if profile:
        print_profile(name, contender)
    return contender.row(name, precision, sizes, interleaved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=pathlib.Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 36])
    parser.add_argument("--precision", nargs="+", choices=("autocast", "bf16"), default=["autocast"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--tiny", action="store_true", help="two steps of a tiny model on a CPU: that the program runs, no figures"
    )
    arguments = parser.parse_args()
    if arguments.tiny:
        sizes = {"layers": 1, "width": 64, "heads": 4, "context": 16, "hidden": 128}
        for precision in ("autocast", "bf16"):
            contender = Contender(False, precision, sizes, 2, "cpu")
            contender.step()
            first = contender.loss
            contender.step()
            print(f"{precision}: losses {first:.3f} and {contender.loss:.3f}")
        return
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark requires a GPU; --tiny shows that it runs")
    torch.set_float32_matmul_precision("high")
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    record = {"machine": machine, "command": "python bench/python/gpt_step.py " + " ".join(sys.argv[1:]), "rows": []}
    for layers in arguments.layers:
        sizes = {"layers": layers, "width": 1280, "heads": 20, "context": 1024, "hidden": 5120}
        for precision in arguments.precision:
            found = measure(sizes, precision, arguments.batch, arguments.rounds, arguments.profile)
            record["rows"] += found
            for row in found:
                phases = ", ".join(f"{phase['phase']} {phase['ms']:.2f}" for phase in row["phases"])
                print(
                    f"{layers} layers, {precision}, {row['contender']}: {row['ms']:.2f} ms ({phases}),"
                    f" {row['bytes'] / 1e9:.1f} GB",
                    flush=True,
                )
            if arguments.output:
                arguments.output.write_text(json.dumps(record, indent=1))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
