#!/usr/bin/env python3
"""Trains a small GPT on the bytes of a file, with the feed-forward layers dense or by one of twofour's recipes.

    python python/examples/gpt_pretrain.py text.txt --method s-ste

Without a file it trains on the package's own source, in fewer and smaller steps: enough to see that it runs.

method        feed-forward layers
dense         torch.nn.Linear
semi-sparse   twofour.sparsity.training.SemiSparseLinear: the mask chosen in every forward pass; --algo says how
s-ste         twofour.pretrain.SparseLinear: soft threshold, estimated weight gradient
fst           twofour.pretrain.SparseLinearTranspose: transposable masks, masked decay, dense for the last sixth of the steps
step          twofour.pretrain.STEPLinear and AdamW_STEP: dense at first, then two of four

Attention, embedding and head are dense, as in the papers. The last tenth of the file is held out.
"""

from __future__ import annotations

import argparse
import functools
import math
import pathlib
import time

import torch
import torch.nn.functional as F
from torch import nn

import twofour
from twofour import pretrain
from twofour.sparsity.training import SemiSparseLinear

METHODS = ("dense", "semi-sparse", "s-ste", "fst", "step")

#: Defaults without a file.
SHORT = {"steps": 30, "batch": 4, "evaluation": 32, "report_every": 10}


class Block(nn.Module):
    """Causal attention and feed-forward, each after a norm."""

    def __init__(self, width: int, heads: int, hidden: int, linear):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = linear(width, hidden), linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Gpt(nn.Module):
    """A GPT over bytes with learned positions. ``linear(in_features, out_features)`` makes the feed-forward layers."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, context: int, linear=nn.Linear):
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden, linear) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.embedding(ids) + self.position(positions))))


def linear_of(method: str, algo: str = ""):
    """What makes the feed-forward layers of a method."""
    return {
        "dense": nn.Linear,
        "semi-sparse": functools.partial(SemiSparseLinear, algo=algo),
        "s-ste": pretrain.SparseLinear,
        "fst": pretrain.SparseLinearTranspose,
        "step": pretrain.STEPLinear,
    }[method]


def optimizer_of(model: nn.Module, method: str, lr: float, steps: int) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices; STEP's for STEP."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if method == "step":
        return pretrain.AdamW_STEP(groups, lr=lr, betas=(0.9, 0.95), clipping=(steps // 10, steps // 2))
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def rate(step: int, steps: int) -> float:
    """The part of the learning rate at a step: a warm-up, then a cosine down to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def windows(data: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets that begin at these places."""
    ids = data[starts[:, None] + torch.arange(context + 1)].long()
    return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def held_out_loss(model: nn.Module, data: torch.Tensor, options) -> float:
    """The mean loss over evenly spaced windows of held-out data."""
    model.eval()
    starts = torch.linspace(0, len(data) - options.context - 1, options.evaluation).long()
    losses = []
    for some in starts.split(options.batch):
        x, y = (t.to(options.device) for t in windows(data, some, options.context))
        losses.append(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item())
    model.train()
    return sum(losses) / (len(starts) * options.context)


def text_of(path: str | None) -> bytes:
    """The bytes of a file; without one, those of the package's Python files."""
    if path is not None:
        return pathlib.Path(path).read_bytes()
    return b"".join(source.read_bytes() for source in sorted(pathlib.Path(twofour.__file__).parent.rglob("*.py")))


def train(options, report=print) -> dict:
    """Trains one model.

    Returns:
        ``train_loss``, the mean over the last tenth of the steps; ``held_out_loss``; ``seconds``, without evaluation.

    Raises:
        ValueError: where the file is too short for one window.
    """
    text = torch.frombuffer(bytearray(text_of(options.data)), dtype=torch.uint8)
    split = len(text) * 9 // 10
    training, held_out = text[:split], text[split:]
    if min(len(training), len(held_out)) < options.context + 2:
        raise ValueError(
            f"{options.data or 'the built-in text'} has {len(text)} bytes, too few for windows of {options.context}: "
            f"choose a longer file or a smaller --context"
        )
    torch.manual_seed(options.seed)
    linear = linear_of(options.method, options.algo)
    model = Gpt(options.layers, options.width, options.heads, options.hidden, options.context, linear).to(
        options.device
    )
    optimizer = optimizer_of(model, options.method, options.lr, options.steps)
    generator = torch.Generator().manual_seed(options.seed)
    losses, start = [], time.perf_counter()
    for step in range(options.steps):
        if options.method == "fst" and step == options.steps - options.steps // 6:
            for block in model.blocks:
                block.up.weight.mode = block.down.weight.mode = "dense"
        for group in optimizer.param_groups:
            group["lr"] = options.lr * rate(step, options.steps)
        starts = torch.randint(len(training) - options.context - 1, (options.batch,), generator=generator)
        x, y = (t.to(options.device) for t in windows(training, starts, options.context))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        pretrain.masked_decay_(model, options.masked_decay)
        optimizer.step()
        losses.append(loss.detach())
        if (step + 1) % options.report_every == 0:
            report(f"step {step + 1:6}  loss {torch.stack(losses[-options.report_every :]).mean().item():.4f}")
    tail = torch.stack(losses[-max(1, options.steps // 10) :]).mean().item()
    seconds = time.perf_counter() - start
    return {"train_loss": tail, "held_out_loss": held_out_loss(model, held_out, options), "seconds": seconds}


def parser(requires_data: bool = True) -> argparse.ArgumentParser:
    """The options of :func:`train`."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", nargs=None if requires_data else "?", help="a file; its bytes are the text")
    p.add_argument("--method", choices=METHODS, default="s-ste")
    p.add_argument("--algo", default="largest_abs_values_greedy", help="how semi-sparse chooses masks")
    p.add_argument("--masked-decay", type=float, default=1e-4, help="the strength of FST's decay of pruned elements")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--report-every", type=int, default=50)
    sizes = {
        "steps": 500,
        "batch": 16,
        "context": 64,
        "layers": 2,
        "width": 128,
        "heads": 4,
        "hidden": 512,
        "evaluation": 256,
    }
    for name, default in sizes.items():
        p.add_argument(f"--{name}", type=int, default=default)
    return p


def main() -> None:
    p = parser(requires_data=False)
    settings = {name: p.get_default(name) for name in SHORT}
    p.set_defaults(**dict.fromkeys(SHORT))
    options = p.parse_args()
    for name, value in (SHORT if options.data is None else settings).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    result = train(options)
    print(
        f"{options.method}: held-out loss {result['held_out_loss']:.4f} after {options.steps} steps in "
        f"{result['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
