"""STEP: the layer and its optimizer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import close

from twofour.pretrain import AdamW_STEP, STEPLinear, sparse24


def net(device="cpu"):
    torch.manual_seed(0)
    return torch.nn.Sequential(STEPLinear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8)).to(device)


def batches(count, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, 16, generator=generator).to(device)


def train(model, optimizer, data):
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_the_layer_is_dense_before_the_switch_and_sparse_after_it_and_in_evaluation(device):
    layer = STEPLinear(20, 12, device=device)
    x = torch.randn(3, 20, device=device, requires_grad=True)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    kept = sparse24(layer.weight.detach())[0].double()
    expected = F.linear(x.double(), kept, layer.bias.double()).detach()
    with torch.no_grad():
        close(layer.eval()(x), expected)
    layer.train().weight.mask = "sparse"
    dy = torch.randn(3, 12, device=device)
    y = layer(x)
    y.backward(dy)
    close(y.detach(), expected)
    close(x.grad, dy.double() @ kept)
    close(layer.weight.grad, dy.double().t() @ x.detach().double())
    assert copy.deepcopy(layer).weight.mask == "sparse"


@pytest.mark.parametrize("amsgrad", [False, True])
def test_before_the_switch_it_is_adamw(device, amsgrad):
    ours, theirs = net(device), net(device)
    options = {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.1, "amsgrad": amsgrad}
    step = AdamW_STEP(ours.parameters(), clipping=(1000, 1000), **options)
    adamw = torch.optim.AdamW(theirs.parameters(), **options)
    data = batches(12, device)
    train(ours, step, data)
    train(theirs, adamw, data)
    assert not step.switched and ours[0].weight.mask == "dense"
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(a.detach(), b.detach())


def test_after_the_switch_the_variance_of_masked_weights_is_frozen(device):
    model = net(device)
    lr, beta1, beta2, eps, decay = 1e-2, 0.8, 0.9, 1e-8, 0.1
    optimizer = AdamW_STEP(model.parameters(), lr, (beta1, beta2), eps, decay, clipping=(3, 4))
    data = batches(7, device)
    train(model, optimizer, data[:4])
    assert not optimizer.switched
    train(model, optimizer, data[4:5])
    assert optimizer.switched and optimizer.switched_at == 5 and model[0].weight.mask == "sparse"
    weight = model[0].weight
    frozen = optimizer.state[weight]["exp_avg_sq"].clone().double()
    mean, p = optimizer.state[weight]["exp_avg"].double(), weight.detach().double()
    other = optimizer.state[model[2].weight]["exp_avg_sq"].clone()
    for t, x in enumerate(data[5:], 6):
        train(model, optimizer, x[None])
        mean = beta1 * mean + (1 - beta1) * weight.grad.double()
        denominator = (frozen / (1 - beta2**5)).sqrt() + eps**0.75
        p = p * (1 - lr * decay) - lr * mean / (1 - beta1**t) / denominator
        close(weight.detach(), p)
    assert torch.equal(optimizer.state[weight]["exp_avg_sq"].double(), frozen)
    assert not torch.equal(optimizer.state[model[2].weight]["exp_avg_sq"], other)


@pytest.mark.parametrize("option", [1, 2])
def test_the_switch_happens_when_the_variance_has_settled(option):
    # A constant gradient: the change of the variance falls by beta2 every step, from 1 - beta2.
    layer = STEPLinear(4, 4, bias=False)
    eps, beta2 = 1e-3, 0.9
    optimizer = AdamW_STEP(layer.parameters(), lr=0.0, betas=(0.9, beta2), eps=eps, option=option)
    changes, expected = [], None
    for t in range(1, 200):
        layer.weight.grad = torch.ones(4, 4)
        optimizer.step()
        changes.append((1 - beta2) * beta2 ** (t - 1))
        if expected is None and sum(changes[-10:]) / len(changes[-10:]) < eps:
            expected = t
        if optimizer.switched:
            break
    assert optimizer.switched_at == expected and expected > 10
    assert layer.weight.mask == "sparse"


def test_clipping_bounds_the_switch():
    for earliest, latest, expected in ((3, 9, 4), (0, 2, 1)):
        layer = STEPLinear(4, 4, bias=False)
        optimizer = AdamW_STEP(layer.parameters(), eps=10.0, clipping=(earliest, latest))
        for _ in range(10):
            layer.weight.grad = torch.ones(4, 4)
            optimizer.step()
        assert optimizer.switched_at == expected
    layer = STEPLinear(4, 4, bias=False)
    optimizer = AdamW_STEP(layer.parameters(), eps=0.0, clipping=(2, 5))
    for _ in range(10):
        layer.weight.grad = torch.randn(4, 4)
        optimizer.step()
    assert optimizer.switched_at == 6


@pytest.mark.parametrize("at", [3, 8])
def test_the_state_is_saved(at):
    data = batches(12)
    model = net()
    optimizer = AdamW_STEP(model.parameters(), clipping=(4, 5))
    train(model, optimizer, data[:at])
    again = net()
    resumed = AdamW_STEP(again.parameters(), clipping=(4, 5))
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.switched == optimizer.switched == (at == 8) and again[0].weight.mask == model[0].weight.mask
    train(model, optimizer, data[at:])
    train(again, resumed, data[at:])
    assert resumed.switched_at == optimizer.switched_at == 6
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_it_follows_a_scheduler_and_a_closure():
    model = net()
    optimizer = AdamW_STEP(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)

    def closure():
        optimizer.zero_grad()
        loss = model(batches(1)[0]).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    scheduler.step()
    before = model[0].weight.clone()
    optimizer.step(closure)
    assert torch.equal(model[0].weight, before)


def test_bad_hyperparameters_are_refused():
    parameters = list(net().parameters())
    for options in (
        {"lr": -1},
        {"eps": -1},
        {"betas": (0.9, 1.0)},
        {"weight_decay": -1},
        {"option": 3},
        {"clipping": (5, 4)},
        {"clipping": (None, 4)},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            AdamW_STEP(parameters, **options)
    embedding = torch.nn.Embedding(4, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        AdamW_STEP(embedding.parameters()).step()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("dtype", "option"), [(torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 1)])
def test_one_pass_on_a_cpu_is_what_torchs_operators_compute(dtype, option, amsgrad):
    # A transposed parameter is not contiguous, so torch updates it.
    parameters = [torch.randn(12, 20).to(dtype)]
    parameters.append(parameters[0].t().contiguous().t())
    optimizers = []
    for p in parameters:
        p.mask = "dense"
        optimizers.append(AdamW_STEP([p], 1e-2, (0.8, 0.9), 1e-4, 0.1, amsgrad, clipping=(3, 3), option=option))
    for _ in range(7):
        gradient = torch.randn(12, 20).to(dtype)
        for p, optimizer in zip(parameters, optimizers, strict=True):
            p.grad = (
                gradient.clone(memory_format=torch.preserve_format)
                if p.is_contiguous()
                else gradient.t().contiguous().t()
            )
            optimizer.step()
        assert optimizers[0].switched_at == optimizers[1].switched_at
        close(parameters[0], parameters[1])
    assert optimizers[0].switched_at == 4
    found, expected = (optimizer.state_dict()["step"]["changes"] for optimizer in optimizers)
    # torch's operators take the difference of rounded variances.
    assert found == pytest.approx(expected, rel=5e-2 if dtype is not torch.float32 else 1e-4)


def test_the_operator_refuses_what_it_cannot_write():
    p, g, m, v, none = torch.ones(4, 6), torch.ones(4, 6), torch.zeros(4, 6), torch.zeros(4, 6), torch.empty(0)
    numbers = (1e-3, 0.9, 0.999, 1e-8, 0.0, 1, 0, 0)
    step = torch.ops.twofour.adamw_step_
    for tensors, message in (
        ((p, g, p, v, none), "the mean is written in place and shares memory"),
        ((p, p, m, v, none), "the parameter is written in place and shares memory"),
        ((p, g, m, v[:, :5], none), "the variance is written in place and must be contiguous"),
        ((p, g, m, v.half(), none), "the variance has dtype"),
        ((p, g, m[:2].clone(), v, none), "the mean"),
        ((p, g[:2], m, v, none), "the gradient"),
        ((p, g, m, v, torch.ones(3)), "the largest variance"),
    ):
        with pytest.raises(RuntimeError, match=message):
            step(*tensors, *numbers)
    assert torch.equal(p, torch.ones(4, 6)) and not m.any() and not v.any()
    step(p, g, m, v, none, *numbers)
    assert m.all()


def test_an_optimizer_without_layers_to_switch_says_so():
    layer = torch.nn.Linear(4, 4)
    optimizer = AdamW_STEP(layer.parameters())
    layer(torch.ones(4)).sum().backward()
    with pytest.warns(UserWarning, match="no parameter takes part in STEP"):
        optimizer.step()
