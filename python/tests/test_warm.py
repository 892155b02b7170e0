"""``twofour.warm``."""

import pytest
import torch

import twofour


def model(device):
    layers = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32)).to(device, torch.bfloat16)
    layers[0].weight = torch.nn.Parameter(twofour.sparse.to_sparse_semi_structured(layers[0].weight.detach(), prune=True))
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


def test_bad_input_is_an_exception(device):
    with pytest.raises(ValueError, match="at least 1"):
        twofour.warm(model(device), tokens=[0])
    with pytest.raises(ValueError, match="no sparse layer"):
        twofour.warm(torch.nn.Linear(4, 4), tokens=[1])
