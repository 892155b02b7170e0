"""Activations that torch.compile leaves to GEMMs."""

import pytest
import torch
from conftest import close
from torch import nn
from torch._inductor import config

import twofour
from twofour import operators
from twofour.operators import epilogues
from twofour.quantization import Int4Linear, QuantizedLinear
from twofour.sparsity import semi_sparse_weight, sparsify_

LAYERS = {"linear": twofour.Linear, "int4": Int4Linear, "int8": QuantizedLinear}
ACTIVATIONS = {"gelu": nn.GELU(), "relu": nn.ReLU(), "silu": nn.SiLU(), None: nn.GELU("tanh")}


@pytest.fixture
def seen(monkeypatch):
    """The activations of the GEMMs of each graph that is compiled, in the order of computation; GEMMs of a CPU have
    them, too."""
    graphs, activate = [], epilogues.activate

    def shown(graph):
        activate(graph)
        graph.lint()
        products = [node for node in graph.nodes if "bias" in str(node.target) and "twofour.linear" in str(node.target)]
        numbers = {number: name for name, number in operators.ACTIVATIONS.items()}
        graphs.append([numbers[node.args[-1]] for node in products])

    monkeypatch.setattr(epilogues, "_gains", lambda result: True)
    monkeypatch.setattr(epilogues, "activate", shown)
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield graphs


def sparse(model, form):
    if form == "sparsify":
        return sparsify_(model, semi_sparse_weight(), prune=True)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:
            model.set_submodule(name, LAYERS[form].from_dense(layer, prune=True))
    return model


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("linear", torch.float32), ("linear", torch.float16)]
    + [(form, torch.bfloat16) for form in ("linear", "sparsify", "int4", "int8")],
)
@torch.no_grad()
def test_a_gemm_applies_the_activation_of_its_result(form, dtype, activation, seen, device):
    model = nn.Sequential(nn.Linear(64, 48), ACTIVATIONS[activation], nn.Linear(48, 32)).eval().to(device, dtype)
    x = torch.randn(2, 5, 64, device=device).to(dtype)
    expected = sparse(model, form)(x)
    close(torch.compile(model)(x), expected)
    assert seen == [[activation, None]]


class Twice(nn.Module):
    """Reads a product and its activation."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 48)

    def forward(self, x):
        y = self.proj(x)
        return torch.relu(y), y.sum(-1)


def test_what_is_read_before_the_activation_is_computed(seen):
    model, x = sparse(Twice().eval(), "linear"), torch.randn(3, 64)
    with torch.no_grad():
        for found, expected in zip(torch.compile(model)(x), model(x), strict=True):
            close(found, expected)
    assert seen == [[None]]


def test_a_backward_pass_has_what_it_reads(seen):
    model, x = sparse(nn.Sequential(nn.Linear(64, 48), nn.SiLU()), "linear"), torch.randn(3, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (found,) = torch.autograd.grad(torch.compile(model)(x).square().sum(), x)
    close(found, expected)
    assert seen[0] == [None]
