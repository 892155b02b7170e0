"""Convolutions with 2:4 weights, beside torch's."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import twofour  # noqa: E402
from command import command, needs_command  # noqa: E402
from twofour.sparsity.training import SemiSparseConv1d, SemiSparseConv2d  # noqa: E402

SETTINGS = [
    {"kernel_size": 1},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2},
    {"kernel_size": 4, "padding": "same"},
    {"kernel_size": 5, "padding": "valid", "bias": False},
    {"kernel_size": 1, "stride": 3, "padding": 1},
    {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 2, "padding": 1, "padding_mode": "replicate"},
]
KINDS = [(nn.Conv1d, twofour.Conv1d, SemiSparseConv1d), (nn.Conv2d, twofour.Conv2d, SemiSparseConv2d)]


def made(kind, channels=8, **settings):
    torch.manual_seed(3)
    return kind(channels, 16, **settings)


def inputs(kind, channels=8):
    return torch.randn(2, channels, *[9, 11][: 1 if kind is nn.Conv1d else 2])


@pytest.mark.parametrize(("plain", "sparse", "training"), KINDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_they_compute_what_torch_does_with_the_same_weight(plain, sparse, training, settings):
    dense, x = made(plain, **settings), inputs(plain)
    layer = sparse.from_dense(dense, prune=True)
    again = layer.to_dense()
    assert twofour.verify(again.weight.detach().movedim(1, -1).flatten(1))
    # The two largest magnitudes of each four input channels.
    groups = dense.weight.detach().movedim(1, -1).flatten(1).unflatten(1, (-1, 4))
    kept = again.weight.detach().movedim(1, -1).flatten(1).unflatten(1, (-1, 4))
    torch.testing.assert_close(kept.abs().sum(-1), groups.abs().topk(2).values.sum(-1))
    for given in (x, x[0], x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x):
        given = given.detach().requires_grad_()
        found, expected = layer(given), again(given)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        (gradient,) = torch.autograd.grad(found.square().sum(), given)
        (right,) = torch.autograd.grad(expected.square().sum(), given)
        torch.testing.assert_close(gradient, right, atol=1e-4, rtol=1e-4)
    assert torch.equal(layer.weight, again.weight.detach())
    other = sparse.from_dense(made(plain, **settings), prune=True)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(copy.deepcopy(other)(x), layer(x))


@pytest.mark.parametrize(("plain", "sparse", "training"), KINDS)
def test_training_prunes_in_every_pass_and_lets_weights_grow_back(plain, sparse, training):
    dense, x = made(plain, kernel_size=3, padding=1), inputs(plain)
    layer = training.from_dense(dense, algo="largest_abs_values_greedy")
    assert layer.weight is dense.weight
    shown = layer.to_dense()
    torch.testing.assert_close(layer(x), shown(x), atol=1e-5, rtol=1e-5)
    layer(x).square().sum().backward()
    gradient = layer.weight.grad.clone()
    shown(x).square().sum().backward()
    torch.testing.assert_close(gradient, shown.weight.grad, atol=1e-4, rtol=1e-4)
    assert bool((gradient[~layer.mask] != 0).any())
    frozen = sparse.from_dense(layer.to_dense())
    torch.testing.assert_close(frozen(x), layer(x), atol=1e-5, rtol=1e-5)
    fresh = training(8, 16, 3)
    assert fresh(x).shape == plain(8, 16, 3)(x).shape


def test_a_kernel_of_one_position_copies_no_input():
    layer = twofour.Conv2d.from_dense(made(nn.Conv2d, kernel_size=1), prune=True)
    x = inputs(nn.Conv2d).contiguous(memory_format=torch.channels_last)
    from twofour.modules.convolution import patches

    assert patches(x, layer).data_ptr() == x.data_ptr() and patches(x, layer).is_contiguous()
    assert layer(x).is_contiguous(memory_format=torch.channels_last)


def test_channels_that_are_no_multiple_of_four_and_autocast():
    dense, x = made(nn.Conv2d, channels=3, kernel_size=3), inputs(nn.Conv2d, channels=3)
    layer = twofour.Conv2d.from_dense(dense, prune=True)
    torch.testing.assert_close(layer(x), layer.to_dense()(x), atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        assert SemiSparseConv2d.from_dense(dense)(x).dtype is torch.bfloat16


def test_what_is_refused_says_why():
    grouped = nn.Conv2d(8, 8, 3, groups=2)
    for layer in (twofour.Conv2d, SemiSparseConv2d):
        with pytest.raises(NotImplementedError, match="2 groups of channels"):
            layer.from_dense(grouped)
        with pytest.raises(TypeError, match="Conv2d is required, not a Linear"):
            layer.from_dense(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="tensor `conv.weight`"):
        twofour.Conv2d.from_dense(made(nn.Conv2d, kernel_size=3), name="conv.weight")
    with pytest.raises(RuntimeError, match="unknown|algo"):
        SemiSparseConv2d.from_dense(made(nn.Conv2d, kernel_size=3), algo="no such")
    layer = twofour.Conv2d.from_dense(made(nn.Conv2d, kernel_size=5), prune=True)
    with pytest.raises(RuntimeError, match="spans 5 elements of dimension 3"):
        layer(torch.randn(1, 8, 9, 4))
    with pytest.raises(RuntimeError, match=r"\[batch, 8, size, size\]"):
        layer(torch.randn(1, 7, 9, 9))


@needs_command
def test_the_command_prunes_what_the_layers_prune(tmp_path):
    layers = {"a": made(nn.Conv2d, kernel_size=3), "b": made(nn.Conv1d, channels=4, kernel_size=5)}
    layers["c"] = made(nn.Conv2d, channels=3, kernel_size=3)
    twofour.save_file({f"{name}.weight": layer.weight for name, layer in layers.items()}, tmp_path / "in.safetensors")
    command("prune", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", "--include", "*")
    pruned = twofour.load_file(tmp_path / "out.safetensors")
    for name, layer in layers.items():
        sparse = (twofour.Conv2d if layer.weight.dim() == 4 else twofour.Conv1d).from_dense(layer, prune=True)
        assert torch.equal(pruned[f"{name}.weight"], sparse.weight)
    command("check", tmp_path / "out.safetensors", "--include", "*")
