"""A few hundred steps of a small model of bytes: every recipe learns about as well as the dense model.

The text is synthetic; the environment variable TWOFOUR_DATA names a file to take instead.
"""

import functools
import os
import pathlib

import pytest
import torch
import torch.nn.functional as F

from twofour.pretrain import AdamW_STEP, SparseLinear, SparseLinearTranspose, STEPLinear, masked_decay_
from twofour.sparsity.training import SemiSparseLinear

CONTEXT, WIDTH, HIDDEN, STEPS = 8, 24, 256, 200


@functools.cache
def text():
    path = os.environ.get("TWOFOUR_DATA")
    if path:
        return torch.frombuffer(bytearray(pathlib.Path(path).read_bytes()[:200_000]), dtype=torch.uint8).long()
    # A chain whose next symbol depends on the last two: eight likely ones out of 48.
    generator = torch.Generator().manual_seed(0)
    likely = torch.randint(48, (48, 48, 8), generator=generator).tolist()
    choice = torch.multinomial(0.6 ** torch.arange(8.0), 60_000, replacement=True, generator=generator).tolist()
    symbols = [0, 1]
    for c in choice:
        symbols.append(likely[symbols[-2]][symbols[-1]][c])
    return torch.tensor(symbols)


class Net(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, WIDTH)
        self.up, self.down = linear(CONTEXT * WIDTH, HIDDEN), linear(HIDDEN, 128)
        self.head = torch.nn.Linear(128, 256)

    def forward(self, ids):
        x = F.gelu(self.up(self.embedding(ids).flatten(1)))
        return self.head(F.gelu(self.down(x)))


@functools.cache
def losses(kind):
    """Mean loss of the first and of the last steps."""
    torch.manual_seed(0)
    recipes = {
        "dense": torch.nn.Linear,
        "SemiSparseLinear": functools.partial(SemiSparseLinear, algo="largest_abs_values_greedy"),
        "S-STE": SparseLinear,
        "FST": functools.partial(SparseLinearTranspose, freq=20),
        "STEP": STEPLinear,
    }
    net = Net(recipes[kind])
    if kind == "STEP":
        optimizer = AdamW_STEP(net.parameters(), lr=3e-3, betas=(0.9, 0.99), clipping=(STEPS // 10, STEPS // 2))
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        starts = torch.randint(len(text()) - CONTEXT, (256,), generator=generator)
        windows = text()[starts[:, None] + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(net(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        masked_decay_(net, 1e-4)
        optimizer.step()
        found.append(loss.item())
    if kind == "STEP":
        assert optimizer.switched and net.up.weight.mask == "sparse"
    return sum(found[:5]) / 5, sum(found[-25:]) / 25


@pytest.mark.parametrize("kind", ["SemiSparseLinear", "S-STE", "FST", "STEP"])
def test_the_loss_falls_to_about_that_of_the_dense_model(kind):
    start, dense = losses("dense")
    assert dense < 0.75 * start
    _, sparse = losses(kind)
    # Half of the two weights is missing: at most a tenth of what the dense model has learned.
    assert sparse - dense < 0.1 * (start - dense), f"dense {start:.3f} -> {dense:.3f}, {kind} -> {sparse:.3f}"
