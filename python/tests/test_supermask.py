"""The layer that learns which blocks to keep."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from twofour.sparsity import SupermaskLinear, block_sparse_weight, sparsify_  # noqa: E402


@pytest.mark.parametrize("level", [0.0, 0.25, 0.5, 0.7])
@pytest.mark.parametrize("block", [1, 2, 4, 8])
def test_the_share_of_blocks_that_are_zero_is_exact(level, block):
    torch.manual_seed(0)
    layer = SupermaskLinear(level, block, False, False, 16, 16)
    blocks = (16 // block) ** 2
    mask = layer.get_mask()
    assert int(mask.sum()) == (blocks - round(level * blocks)) * block * block
    tiles = mask.unfold(0, block, block).unfold(1, block, block).reshape(blocks, -1)
    assert bool(((tiles == tiles[:, :1]).all(1)).all())
    dense = layer.to_linear()
    x = torch.randn(3, 16)
    torch.testing.assert_close(dense(x), layer(x))
    assert type(dense) is nn.Linear and torch.equal(dense.weight != 0, mask != 0)


def test_the_highest_scores_are_kept_and_of_equal_ones_the_earlier():
    layer = SupermaskLinear(0.5, 4, False, False, 8, 8)
    with torch.no_grad():
        layer.scores.copy_(torch.tensor([[-3.0, 2.0], [-1.0, 2.0]]))
    assert torch.equal(layer.get_mask()[::4, ::4], torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    with torch.no_grad():
        layer.scores.zero_()
    assert torch.equal(layer.get_mask()[::4, ::4], torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_blocks_that_do_not_divide_the_weight_are_cut():
    layer = SupermaskLinear(0.5, 4, False, False, 10, 6)
    assert tuple(layer.scores.shape) == (2, 3) and tuple(layer.get_mask().shape) == (6, 10)
    layer(torch.randn(2, 10)).sum().backward()
    assert layer.scores.grad is not None and layer.weight.grad is not None


def test_scores_get_the_gradient_of_the_mask():
    torch.manual_seed(1)
    layer = SupermaskLinear(0.5, 2, False, True, 8, 4)
    x = torch.randn(5, 8)
    layer(x).pow(2).sum().backward()
    mask = layer.get_mask().detach().requires_grad_()
    nn.functional.linear(x, layer.weight * mask, layer.bias).pow(2).sum().backward()
    expected = mask.grad.unfold(0, 2, 2).unfold(1, 2, 2).sum((2, 3))
    torch.testing.assert_close(layer.scores.grad, expected)
    assert layer.weight.grad is None
    frozen = SupermaskLinear(0.5, 2, True, False, 8, 4)
    frozen(x).sum().backward()
    assert frozen.scores.grad is None and frozen.weight.grad is not None


def test_scores_learn_which_half_matters():
    torch.manual_seed(2)
    target = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        target.weight[:, 8:] = 0
    layer = SupermaskLinear.from_linear(nn.Linear(16, 16, bias=False), 0.5, 8)
    with torch.no_grad():
        layer.scores.copy_(torch.tensor([[0.0, 0.1], [0.0, 0.1]]))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    for _ in range(300):
        x = torch.randn(64, 16)
        optimizer.zero_grad()
        nn.functional.mse_loss(layer(x), target(x)).backward()
        optimizer.step()
    assert torch.equal(layer.get_mask()[::8, ::8], torch.tensor([[1.0, 0.0], [1.0, 0.0]]))


def test_a_layer_is_made_of_another_one_and_gives_a_block_sparse_weight():
    linear = nn.Linear(128, 128).eval()
    layer = SupermaskLinear.from_linear(linear, 0.75, 64)
    assert layer.weight is linear.weight and layer.bias is linear.bias and not layer.training
    whole = SupermaskLinear.from_linear(linear)
    x = torch.randn(4, 128)
    torch.testing.assert_close(whole(x), linear(x))
    model = nn.Sequential(layer.to_linear())
    sparsify_(model, block_sparse_weight(blocksize=64))
    torch.testing.assert_close(model(x), layer(x), atol=1e-5, rtol=1e-5)
    again = SupermaskLinear(0.75, 64, False, False, 128, 128)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))


def test_wrong_settings_are_errors():
    for level, block, message in [(1.0, 4, "leaves none"), (-0.1, 4, "leaves none"), (0.5, 0, "at least one element")]:
        with pytest.raises(ValueError, match=message):
            SupermaskLinear(level, block, False, False, 8, 8)
    with pytest.raises(ValueError, match="at most 0.75"):
        SupermaskLinear(0.9, 4, False, False, 8, 8)
