"""``twofour.warm``."""

import pytest
import torch

import twofour


def model(device):
    layers = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32)).to(
        device, torch.bfloat16
    )
    layers[0].weight = torch.nn.Parameter(
        twofour.sparse.to_sparse_semi_structured(layers[0].weight.detach(), prune=True)
    )
    return layers


def test_sparse_layers_are_counted_and_computed(device):
    assert twofour.warm(model(device), tokens=[1, 8], gradients=True) == 1


def test_a_warm_model_can_be_captured(device):
    if device != "cuda":
        pytest.skip("graphs are for GPUs")
    layers = model(device)
    twofour.warm(layers, tokens=[8])
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = layers(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layers(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert not torch.equal(y, expected)
        assert torch.equal(y, layers(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("make", [twofour.quantization.QuantizedLinear.from_dense, twofour.Int4Linear.from_dense])
def test_layers_of_integers_are_counted_and_computed(device, make, bias, monkeypatch):
    layer = make(torch.nn.Linear(256, 96, bias=bias, device=device, dtype=torch.bfloat16), prune=True)
    met = []
    monkeypatch.setattr(
        type(layer),
        "forward",
        lambda self, x, forward=type(layer).forward: met.append((*x.shape, x.dtype)) or forward(self, x),
    )
    assert twofour.warm(torch.nn.Sequential(layer, torch.nn.ReLU()), tokens=[1, 8], gradients=True) == 1
    types = [torch.bfloat16] if bias else [torch.bfloat16, torch.float16]
    assert set(met) == {(tokens, 256, dtype) for tokens in (1, 8) for dtype in types}


@pytest.mark.parametrize("make", [twofour.quantization.QuantizedLinear.from_dense, twofour.Int4Linear.from_dense])
def test_a_warm_layer_of_integers_can_be_captured(device, make):
    if device != "cuda":
        pytest.skip("no GPU: graphs are for GPUs")
    layer = make(torch.nn.Linear(256, 96, device=device, dtype=torch.bfloat16), prune=True)
    twofour.warm(torch.nn.Sequential(layer), tokens=[8])
    x = torch.randn(8, 256, device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, layer(x))


def test_bad_input_is_an_exception(device):
    with pytest.raises(ValueError, match="at least 1"):
        twofour.warm(model(device), tokens=[0])
    with pytest.raises(ValueError, match="no sparse layer"):
        twofour.warm(torch.nn.Linear(4, 4), tokens=[1])
