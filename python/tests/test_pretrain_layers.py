"""The layers of S-STE and FST."""

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import close
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

from twofour.pretrain import (
    MVUE24_approx,
    SparseLinear,
    SparseLinearTranspose,
    TransposableSparse,
    masked_decay_,
    soft_threshold24,
)

LAYERS = [SparseLinear, SparseLinearTranspose]


def kept(layer):
    """The weight that a layer multiplies with, from the definitions of the papers, in float64."""
    weight = layer.weight.detach()
    if isinstance(layer, SparseLinearTranspose):
        return (weight * layer.mask).double()
    soft = soft_threshold24(weight)[0].double()
    return (weight.double() * soft).sum() / soft.square().sum() * soft


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(), (6,), (2, 1, 4)])
@pytest.mark.parametrize("cls", LAYERS)
def test_results_and_gradients_are_those_of_the_dense_layer_with_the_sparse_weight(device, cls, leading, bias):
    for out_features, in_features in ((32, 64), (37, 70)):
        layer = cls(in_features, out_features, bias=bias, device=device, weight_gradient="dense")
        x = torch.randn(*leading, in_features, device=device, requires_grad=True)
        dy = torch.randn(*leading, out_features, device=device)
        y = layer(x)
        y.backward(dy)
        ours = [x.detach().double(), kept(layer)] + ([layer.bias.detach().double()] if bias else [])
        for t in ours:
            t.requires_grad_()
        expected = F.linear(*ours)
        expected.backward(dy.double())
        close(y.detach(), expected.detach())
        for found, t in zip((x, layer.weight, layer.bias), ours, strict=False):
            close(found.grad, t.grad)
        with torch.inference_mode():
            close(layer.eval()(x), expected)


@pytest.mark.parametrize("estimate", ["mvue", "mvue-approximate"])
@pytest.mark.parametrize("cls", LAYERS)
def test_the_estimated_weight_gradient_is_unbiased(device, cls, estimate):
    layer = cls(12, 8, device=device, weight_gradient=estimate)
    x, dy = torch.randn(3, 7, 12, device=device), torch.randn(3, 7, 8, device=device)
    exact = dy.reshape(-1, 8).double().t() @ x.reshape(-1, 12).double()
    draws = []
    for _ in range(400):
        layer.zero_grad()
        layer(x).backward(dy)
        draws.append(layer.weight.grad.double())
    draws = torch.stack(draws)
    deviation = draws.std(0)
    assert (deviation > 0).all()
    assert ((draws.mean(0) - exact).abs() <= 5 * deviation / 20 + 1e-6).all()
    close(layer.bias.grad, dy.double().sum((0, 1)))


@pytest.mark.parametrize("cls", LAYERS)
def test_random_numbers_follow_torchs_seed(cls):
    layer = cls(16, 8)
    x = torch.randn(12, 16)
    gradients = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        layer.zero_grad()
        layer(x).square().sum().backward()
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize("cls", LAYERS)
def test_autocast_types_and_checkpointing(device, cls):
    layer = cls(32, 16, device=device, weight_gradient="dense")
    x = torch.randn(8, 32, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x)
    dy = torch.randn(8, 16, device=device)
    y.backward(dy.bfloat16())
    assert y.dtype == torch.bfloat16 and layer.weight.grad.dtype == x.grad.dtype == torch.float32
    close(y.detach(), F.linear(x.double(), kept(layer), layer.bias.double()).detach(), torch.bfloat16)
    close(x.grad, dy.double() @ kept(layer), torch.bfloat16)
    close(layer.weight.grad, dy.double().t() @ x.detach().double(), torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        other = cls(32, 16, device=device, dtype=dtype)
        close(other(x.to(dtype)).detach(), F.linear(x.to(dtype).double(), kept(other), other.bias.double()).detach())
    layer.zero_grad()
    layer(x).square().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert torch.equal(layer.weight.grad, expected)


def test_the_scale_is_computed_once_and_saved(device):
    layer = SparseLinear(64, 48, device=device)
    assert layer.scale == 0
    torch.nn.init.normal_(layer.weight, std=0.02)
    layer(torch.randn(2, 64, device=device))
    scale = layer.scale.clone()
    assert 1.4 < scale < 1.6
    close(layer.get_sparse_weights(), kept(layer))
    with torch.no_grad():
        layer.weight.pow_(3)
    layer(torch.randn(2, 64, device=device))
    assert torch.equal(layer.scale, scale)
    again = SparseLinear(64, 48, device=device)
    again.load_state_dict(layer.state_dict())
    x = torch.randn(2, 64, device=device)
    assert torch.equal(again(x), layer(x)) and torch.equal(again.scale, scale)
    layer.init_scale()
    assert not torch.equal(layer.scale, scale)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    empty = SparseLinear(8, 4)
    torch.nn.init.ones_(empty.weight)
    assert torch.equal(empty(torch.ones(1, 8)), empty.bias[None]) and empty.scale == 1


def test_the_mask_changes_every_freq_steps_and_the_weight_every_step(device):
    layer = SparseLinearTranspose(32, 16, device=device, freq=3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    x = torch.randn(8, 32, device=device)
    masks = []
    for _ in range(7):
        for _ in range(2):
            y = layer(x)
            close(y.detach(), F.linear(x.double(), kept(layer), layer.bias.double()).detach())
            y.square().sum().backward()
        assert layer.weight.cnt == 2
        masks.append(layer.mask.clone())
        optimizer.step()
        optimizer.zero_grad()
        layer.weight.cnt = 0
    changes = [not torch.equal(a, b) for a, b in itertools.pairwise(masks)]
    assert changes == [False, False, True, False, False, True]
    assert 0 < layer.flip_rate < 1
    assert torch.equal(masks[0].view(4, 4, 8, 4).sum(1), torch.full((4, 8, 4), 2, device=device))


def test_a_step_is_noticed_without_the_toolkits_counter(device):
    layer = SparseLinearTranspose(16, 8, device=device, freq=2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    x = torch.randn(4, 16, device=device)
    for _ in range(5):
        y = layer(x)
        close(y.detach(), F.linear(x.double(), kept(layer), layer.bias.double()).detach())
        y.square().sum().backward()
        optimizer.step()
    assert layer._steps == 5
    with torch.no_grad():
        close(layer.eval()(x), F.linear(x.double(), kept(layer), layer.bias.double()))
    assert layer._steps == 5


@pytest.mark.parametrize("cls", [SparseLinear, SparseLinearTranspose])
def test_weights_that_change_behind_their_version_are_seen(device, cls):
    layer = cls(16, 8, device=device)
    x = torch.randn(4, 16, device=device)
    layer(x)
    other = torch.randn(8, 16, device=device)
    for change in (
        lambda: layer.weight.data.mul_(-5),
        lambda: layer.weight.data.copy_(other),
        lambda: torch.nn.utils.vector_to_parameters(
            torch.cat((other.flatten() * 3, layer.bias.data)), layer.parameters()
        ),
        lambda: setattr(layer.weight, "data", other * 2),
    ):
        change()
        # The scale of S-STE stays that of the first weight.
        weight = layer.get_sparse_weights().double() if cls is SparseLinear else kept(layer)
        with torch.no_grad():
            close(layer(x), F.linear(x.double(), weight, layer.bias.double()))


def test_an_optimizers_step_through_data_is_noticed(device):
    class Through(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad)

    layer = SparseLinearTranspose(16, 8, device=device, freq=2)
    optimizer = Through(layer.parameters(), lr=0.1)
    x = torch.randn(4, 16, device=device)
    for steps in range(1, 5):
        for _ in range(2):
            layer(x).square().sum().backward()
        assert layer._steps == steps
        optimizer.step()


def test_masked_decay_names_a_layer_whose_mask_it_cannot_find():
    """Of flat parameters and of parametrizations: nothing would decay."""
    net = torch.nn.Sequential(SparseLinearTranspose(16, 8), torch.nn.Linear(8, 8))
    torch.nn.utils.parametrize.register_parametrization(net[0], "weight", torch.nn.Identity())
    net(torch.randn(4, 16)).sum().backward()
    with pytest.raises(RuntimeError, match="the weight of 0 is no parameter"):
        masked_decay_(net, 0.5)


def test_masked_decay_reaches_pruned_elements_only_and_dense_mode_is_dense(device):
    layer = SparseLinearTranspose(16, 8, device=device)
    other = torch.nn.Linear(8, 4, device=device)
    net = torch.nn.Sequential(layer, other)
    x = torch.randn(4, 16, device=device)
    net(x).square().sum().backward()
    before = [p.grad.clone() for p in net.parameters()]
    masked_decay_(net, 0.5)
    close(layer.weight.grad, before[0].double() + 0.5 * (layer.weight * ~layer.mask).detach().double())
    for p, gradient in list(zip(net.parameters(), before, strict=True))[1:]:
        assert torch.equal(p.grad, gradient)
    layer.weight.mode = "dense"
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    before = layer.weight.grad.clone()
    masked_decay_(net, 0.5)
    assert torch.equal(layer.weight.grad, before)


def test_the_mask_is_saved_copied_and_moved(device):
    layer = SparseLinearTranspose(16, 8, device=device)
    x = torch.randn(4, 16, device=device)
    layer(x)
    with torch.no_grad():
        layer.weight.neg_().add_(torch.randn_like(layer.weight) * 0.1)
    expected = layer(x)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    again = SparseLinearTranspose(16, 8, device=device)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again(x), expected) and torch.equal(again.mask, layer.mask)
    layer.weight.mode = "dense"
    copied = copy.deepcopy(layer)
    assert copied.weight.mode == "dense" and copied.weight.mask is copied.mask
    layer.weight.mode = "sparse"
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    halved = layer.to(torch.bfloat16)
    assert halved.weight.mode == "sparse" and halved.weight.mask is halved.mask
    assert torch.equal(halved(x.bfloat16()), copy.deepcopy(halved)(x.bfloat16()))


def test_the_mask_is_the_transposable_one(device):
    layer = SparseLinearTranspose(16, 8, device=device)
    layer(torch.randn(2, 16, device=device))
    assert torch.equal(layer.mask, TransposableSparse()(layer.weight)[1])


@pytest.fixture(params=["aot_eager", "inductor"])
def counted(request):
    """Compiles in one graph; ``graphs`` counts how often."""
    torch._dynamo.reset()

    def compiled(function):
        backend = torch._dynamo.lookup_backend(request.param)

        def count(*args):
            compiled.graphs += 1
            return backend(*args)

        return torch.compile(function, fullgraph=True, backend=count)

    compiled.graphs = 0
    # Inductor's own random numbers are other ones than torch's.
    with inductor_config.patch(fallback_random=True):
        yield compiled


@pytest.mark.parametrize("weight_gradient", ["dense", "mvue", "mvue-approximate"])
def test_the_soft_threshold_compiles_once(device, counted, weight_gradient):
    layer = SparseLinear(64, 48, device=device, weight_gradient=weight_gradient)
    eager, compiled = copy.deepcopy(layer), counted(layer)
    for step in range(5):
        x = torch.randn(32, 64, device=device)
        found = []
        for model, call in ((eager, eager), (layer, compiled)):
            torch.manual_seed(step)
            y = call(x)
            # Not all alike, so that the estimate is a matter of chance.
            (y * torch.arange(48, device=device)).square().sum().backward()
            with torch.no_grad():
                model.weight -= 1e-6 * model.weight.grad
            found.append((y, model.weight.grad.clone(), model.scale))
            model.weight.grad = None
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    # With the first call, which computes the scale, and without.
    assert counted.graphs == 2


def test_a_loaded_layer_is_compiled_once_alone(counted):
    layer = SparseLinear(64, 48)
    layer.init_scale()
    compiled = counted(layer)
    for _ in range(3):
        compiled(torch.randn(32, 64)).sum().backward()
    assert counted.graphs == 1


def test_the_estimate_of_a_seed_compiles_once(device, counted):
    compiled = counted(MVUE24_approx)
    dense = torch.randn(8, 64, device=device)
    for seed in (0, 1, 2**61, -1):
        seed = torch.tensor(seed, device=device)
        assert torch.equal(compiled(dense, seed), MVUE24_approx(dense, seed))
        assert torch.equal(MVUE24_approx(dense, seed), MVUE24_approx(dense, int(seed)))
    assert counted.graphs == 1
    drawn = counted(lambda dense: MVUE24_approx(dense))
    for seed in range(3):
        torch.manual_seed(seed)
        expected = MVUE24_approx(dense)
        torch.manual_seed(seed)
        assert torch.equal(drawn(dense), expected)
        assert not torch.equal(drawn(dense), expected)
    assert counted.graphs == 2


def test_bad_seeds_are_exceptions():
    dense = torch.randn(8, 64)
    with pytest.raises(RuntimeError, match="the seed must be one number, not 2"):
        MVUE24_approx(dense, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="the seed has dtype float32"):
        MVUE24_approx(dense, torch.zeros(()))


def test_bad_input_is_an_exception():
    for cls in LAYERS:
        with pytest.raises(ValueError, match="unknown weight gradient 'best'"):
            cls(8, 8, weight_gradient="best")
        with pytest.raises(RuntimeError, match="must be 8"):
            cls(8, 8)(torch.randn(2, 4))
        layer = cls(8, 8)
        torch.nn.init.constant_(layer.weight, torch.nan)
        with pytest.raises(ValueError, match="NaN"):
            layer(torch.randn(2, 8))
    with pytest.raises(ValueError, match="freq must be at least 1"):
        SparseLinearTranspose(8, 8, freq=0)
