"""State dicts and pickles of an earlier version load and compute the same, and its public names and signatures stay.

``earlier/`` was written by commit 6c449b6 with torch 2.15 (``earlier/make.py``; ``names.json`` by a walk over the public modules).
"""

import importlib
import inspect
import json
import pathlib

import pytest
import torch
import twofour
from twofour.sparsity import SemiSparseWeightConfig, sparsify_
from twofour.sparsity.training import SemiSparseLinear

EARLIER = pathlib.Path(__file__).parent / "earlier"


def load(name):
    return torch.load(EARLIER / f"{name}.pt", weights_only=False)


def fresh(name):
    """A layer or model of the kind, with other values."""
    torch.manual_seed(9)
    dense = torch.nn.Linear(64, 32)
    match name:
        case "linear":
            return twofour.Linear.from_dense(dense, prune=True)
        case "int4":
            return twofour.Int4Linear.from_dense(dense, prune=True)
        case "training":
            return SemiSparseLinear(64, 32)
        case "sparsified":
            model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
            sparsify_(model, SemiSparseWeightConfig(), prune=True)
            return model


@pytest.mark.parametrize("name", ["linear", "int4", "training", "sparsified"])
def test_what_was_saved_computes_the_same(name):
    expected = load("expected")
    layer = fresh(name)
    layer.load_state_dict(load(f"{name}.state"))
    for found in (layer, load(f"{name}.pickle")):
        torch.testing.assert_close(found(expected["x"]).detach(), expected[name], rtol=1e-5, atol=1e-5)


def test_public_names_and_signatures_stay():
    changed = {}
    for path, signature in json.loads((EARLIER / "names.json").read_text()).items():
        parts = path.split(".")
        found = None
        for end in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:end]))
            except ImportError:
                continue
            break
        for part in parts[end:]:
            found = inspect.getattr_static(found, part, None) or getattr(found, part, None)
        if found is None and signature is not None:
            changed[path] = "gone"
        elif signature is not None:
            found = getattr(found, "__func__", found)
            if str(inspect.signature(found)) != signature:
                changed[path] = f"{signature} became {inspect.signature(found)}"
    assert not changed
