#!/usr/bin/env python3
"""torchao's programs for 2:4 sparsity, with the import changed: training whose masks are chosen in every step, and
compression for inference.

    python python/examples/torchao_sparsity.py

The calls are those of the READMEs of torchao.sparsity; `torchao.sparsity` became `twofour.sparsity`.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from twofour.sparsity import WandaSparsifier, apply_fake_sparsity  # was: from torchao.sparsity import …
from twofour.sparsity.sparse_api import semi_sparse_weight, sparsify_
from twofour.sparsity.training import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16 if DEVICE == "cuda" else torch.float32


class Mlp(nn.Module):
    """Two linear layers whose names begin with "seq"."""

    def __init__(self):
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.seq(x)


def train(model: nn.Module, steps: int = 25) -> list[float]:
    """Trains a model to turn its input around; returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 128, generator=generator).to(DEVICE, DTYPE)
        loss = F.mse_loss(model(x).float(), x.flip(-1).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sparse_training() -> None:
    """Layers are swapped, the usual loop trains, and layers are swapped back."""
    for layer in (SemiSparseLinear, SemiSparseActivationLinear):
        torch.manual_seed(0)
        model = Mlp().to(DEVICE).to(DTYPE)
        sparse_config = {"seq.0": layer, "seq.2": layer}
        swap_linear_with_semi_sparse_linear(model, sparse_config)
        losses = train(model)
        swap_back_and_compress(model)
        assert losses[-1] < losses[0] and not isinstance(model.seq[0], layer)
        print(f"{layer.__name__}: loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")


def swap_back_and_compress(model: nn.Module) -> None:
    """Leaves linear layers; those that were trained with 2:4 weights compute the same as before, compressed, too."""
    x = torch.randn(16, 128, device=DEVICE, dtype=DTYPE)
    by_weights = isinstance(model.seq[0], SemiSparseLinear)
    with torch.no_grad(), warnings.catch_warnings():
        # No linear layer prunes activations, of which swapping back warns.
        warnings.simplefilter("ignore" if not by_weights else "error")
        trained = model(x)
        swap_semi_sparse_linear_with_linear(model)
        if by_weights:
            torch.testing.assert_close(model(x), trained, rtol=1e-2, atol=1e-3)
            torch.testing.assert_close(sparsify_(model, semi_sparse_weight())(x), trained, rtol=1e-2, atol=1e-3)


def sparse_inference() -> None:
    """Weights are pruned by magnitude or by Wanda and compressed."""
    x = torch.randn(16, 128, device=DEVICE, dtype=DTYPE)
    by_magnitude = Mlp().to(DEVICE, DTYPE).eval()
    apply_fake_sparsity(by_magnitude)

    by_wanda = Mlp().to(DEVICE, DTYPE).eval()
    sparsifier = WandaSparsifier(semi_structured_block_size=4)
    sparsifier.prepare(by_wanda, config=None)
    by_wanda(torch.randn(256, 128, device=DEVICE, dtype=DTYPE))
    sparsifier.step()
    sparsifier.squash_mask()

    for name, model in (("magnitude", by_magnitude), ("Wanda", by_wanda)):
        with torch.inference_mode():
            expected = model(x)
            sparsify_(model, semi_sparse_weight())
            difference = (model(x) - expected).abs().max().item()
        assert difference < 1e-2
        print(f"pruned by {name}: the largest difference after compression is {difference:.1e}")


if __name__ == "__main__":
    sparse_training()
    sparse_inference()
