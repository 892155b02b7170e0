"""Writes what test_earlier.py reads, with the package that is on the path: state dicts, pickles and an exported list of public names."""

import inspect
import json
import pathlib
import sys

import torch
import twofour
import twofour.quantization
from twofour.sparsity import SemiSparseWeightConfig, sparsify_
from twofour.sparsity.training import SemiSparseLinear, swap_linear_with_semi_sparse_linear


def layers():
    torch.manual_seed(0)
    dense = torch.nn.Linear(64, 32)
    twofour_linear = twofour.Linear.from_dense(dense, prune=True)
    return {
        "linear": twofour_linear,
        "int4": twofour.Int4Linear.from_dense(dense, prune=True),
        "training": SemiSparseLinear.from_dense(torch.nn.Linear(64, 32)),
    }


def main(folder):
    out = pathlib.Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    x = torch.randn(5, 64)
    expected = {"x": x}
    for name, layer in layers().items():
        torch.save(layer.state_dict(), out / f"{name}.state.pt")
        torch.save(layer, out / f"{name}.pickle.pt")
        expected[name] = layer(x).detach()
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
    for i in (0, 2):
        weight = model[i].weight.data
        keep = torch.zeros_like(weight).view(-1, 4).scatter_(1, weight.view(-1, 4).abs().topk(2).indices, 1).view_as(weight)
        model[i].weight.data = weight * keep
    sparsify_(model, SemiSparseWeightConfig())
    torch.save(model.state_dict(), out / "sparsified.state.pt")
    torch.save(model, out / "sparsified.pickle.pt")
    expected["sparsified"] = model(x).detach()
    torch.save(expected, out / "expected.pt")


main(sys.argv[1])
