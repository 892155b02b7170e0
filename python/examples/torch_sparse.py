#!/usr/bin/env python3
"""PyTorch's programs for semi-structured sparsity, with the import changed: a linear layer of a 2:4 weight, timed
against the dense one, and a model that torch.ao.pruning prunes.

    python python/examples/torch_sparse.py

The calls are those of PyTorch's tutorial and of torchao's README; `from torch.sparse import` became `from
twofour.sparse import`. On a CPU the shapes are smaller and the dtype is float32, which CPUs multiply fast.
"""

import statistics
import time

import torch
from torch.ao.pruning import WeightNormSparsifier

from twofour.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured  # was: from torch.sparse import …

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16 if DEVICE == "cuda" else torch.float32
OUT, IN, TOKENS = (3072, 10240, 3072) if DEVICE == "cuda" else (768, 2560, 8)


def milliseconds(*functions, rounds: int = 15) -> list[float]:
    """The median time of each function; they take turns."""
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


def one_layer() -> None:
    """A linear layer whose weight is masked to 2:4, dense and compressed."""
    mask = torch.Tensor([0, 0, 1, 1]).tile((OUT, IN // 4)).to(DEVICE).bool()
    linear = torch.nn.Linear(IN, OUT).to(DEVICE, DTYPE).eval()
    linear.weight = torch.nn.Parameter(mask * linear.weight)
    dense = torch.nn.Linear(IN, OUT).to(DEVICE, DTYPE).eval()
    dense.load_state_dict(linear.state_dict())
    x = torch.rand(TOKENS, IN, device=DEVICE, dtype=DTYPE)

    with torch.inference_mode():
        dense_output = dense(x)
        linear.weight = torch.nn.Parameter(to_sparse_semi_structured(linear.weight))
        sparse_output = linear(x)
        dense_t, sparse_t = milliseconds(lambda: dense(x), lambda: linear(x))
    assert torch.allclose(sparse_output, dense_output, atol=1e-3, rtol=1e-2)
    print(
        f"[{OUT}, {IN}], {TOKENS} tokens: dense {dense_t:.3f} ms, sparse {sparse_t:.3f} ms, speedup "
        f"{dense_t / sparse_t:.3f}x"
    )


def a_pruned_model() -> None:
    """Masks by torch.ao.pruning, GEMMs by twofour."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128)).to(DEVICE, DTYPE)
    sparse_config = [
        {"tensor_fqn": f"{name}.weight"}
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(model, sparse_config)
    sparsifier.step()
    sparsifier.squash_mask()

    x = torch.rand(32, 256, device=DEVICE, dtype=DTYPE)
    with torch.no_grad():
        expected = model(x)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(to_sparse_semi_structured(module.weight))
                assert isinstance(module.weight, SparseSemiStructuredTensor)
        assert torch.allclose(model(x), expected, atol=1e-3, rtol=1e-2)
    print("the pruned model computes the same with compressed weights")


if __name__ == "__main__":
    one_layer()
    a_pruned_model()
