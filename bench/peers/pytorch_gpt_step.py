#!/usr/bin/env python3
"""Median time of a training step of a small GPT in PyTorch eager, f32, on the CPU.

The same architecture as twofour_nn::model::Gpt: byte embedding, pre-norm causal attention with rotary positions,
pre-norm feed-forward with exact GELU, final norm, untied head; AdamW with decay for matrices, clipping to norm 1,
cosine schedule left out (it costs nothing). Attention is scaled_dot_product_attention; the optimizer is whichever of
PyTorch's foreach and fused AdamW is faster here.

    python bench/peers/pytorch_gpt_step.py [--steps 8] [--batch 4] [--threads 2]

Prints one JSON object. The other side: cargo run --release -p twofour-nn --example train_step.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x, cos, sin):
        b, t, w = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        rotate = lambda a: torch.cat((-a.chunk(2, -1)[1], a.chunk(2, -1)[0]), -1)
        q, k = q * cos + rotate(q) * sin, k * cos + rotate(k) * sin
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, context, hidden):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        half = width // heads // 2
        angle = torch.arange(context)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def forward(self, ids):
        x = self.embedding(ids)
        t = ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:t], self.sin[:t])
        return self.head(self.norm(x))


def contender(options, sizes):
    torch.manual_seed(0)
    model = Gpt(**sizes)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), **options)

    def step(ids, targets):
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    for name, default in [("layers", 2), ("width", 1024), ("heads", 8), ("context", 256), ("hidden", 3072)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    sizes = {key: getattr(a, key) for key in ("layers", "width", "heads", "context", "hidden")}
    contenders = {name: contender({name: True}, sizes) for name in ("foreach", "fused")}
    times = {name: [] for name in contenders}
    generator = torch.Generator().manual_seed(1)
    for index in range(a.steps + 2):
        ids = torch.randint(0, 256, (a.batch, a.context + 1), generator=generator)
        for name, step in contenders.items():
            start = time.perf_counter()
            step(ids[:, :-1], ids[:, 1:].contiguous())
            if index >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(medians, key=medians.get)
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "threads": a.threads,
                "batch": a.batch,
                "steps": a.steps,
                **sizes,
                "adamw": best,
                "step_ms": medians[best],
                "step_ms_by_adamw": medians,
                "tokens_per_s": a.batch * a.context / medians[best] * 1e3,
            }
        )
    )


if __name__ == "__main__":
    main()
