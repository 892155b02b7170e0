"""Losses and tuning by which a pruned module recovers from its dense twin."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import twofour.recovery as recovery  # noqa: E402


def pruned(module):
    """A copy whose linear layers are 2:4 by magnitude."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            groups = layer.weight.data.view(-1, 4)
            least = groups.abs().argsort(dim=1)[:, :2]
            groups.scatter_(1, least, 0.0)
    return module


def block(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(dtype)


def zeros(module):
    return {name: p == 0 for name, p in module.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 2.0), (0.7, 0.4)])
def test_the_loss_by_chunks_is_that_of_all_logits(chunk, weights):
    torch.manual_seed(1)
    head, teacher = nn.Linear(8, 50), nn.Linear(12, 50)
    hidden, taught = torch.randn(3, 4, 8, requires_grad=True), torch.randn(3, 4, 12)
    targets = torch.randint(0, 50, (3, 4))
    targets[1, 2] = -100
    divergence, cross_entropy = weights
    own = F.log_softmax(head(hidden), -1).flatten(0, 1)
    expected = divergence * F.kl_div(own, F.log_softmax(teacher(taught), -1).flatten(0, 1), reduction="sum", log_target=True)
    expected = (expected + cross_entropy * F.nll_loss(own, targets.flatten(), reduction="sum")) / 12
    gradients = torch.autograd.grad(expected, [hidden, head.weight])
    given = targets if cross_entropy else None
    loss = recovery.distillation_loss(
        hidden, head, taught, teacher, given, divergence=divergence, cross_entropy=cross_entropy, chunk=chunk
    )
    torch.testing.assert_close(loss, expected)
    loss.backward()
    torch.testing.assert_close([hidden.grad, head.weight.grad], list(gradients))
    assert teacher.weight.grad is None


def test_a_loss_of_what_does_not_fit_is_refused():
    head, x = nn.Linear(8, 50), torch.randn(4, 8)
    for words, arguments, options in [
        ("tokens of the student, 3", (x, head, x[:3], head), {}),
        ("targets", (x, head, x, head, torch.zeros(3, dtype=torch.long)), {"cross_entropy": 1.0}),
        ("where there are targets", (x, head, x, head), {"cross_entropy": 1.0}),
        ("where there are targets", (x, head, x, head, torch.zeros(4, dtype=torch.long)), {}),
        ("one of them above 0", (x, head, x, head), {"divergence": 0.0}),
        ("one of them above 0", (x, head, x, head), {"divergence": -1.0}),
        ("chunk", (x, head, x, head), {"chunk": 0}),
        ("no tokens", (x[:0], head, x[:0], head), {}),
        ("50 logits, and the teacher 49", (x, head, x, nn.Linear(8, 49)), {}),
    ]:
        with pytest.raises(ValueError, match=words):
            recovery.distillation_loss(*arguments, **options)


def test_zeros_stay_under_optimizers_within_and_train_outside():
    dense = block()
    student = pruned(dense)
    before = zeros(student)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    x = torch.randn(64, 16)

    def step():
        optimizer.zero_grad()
        F.mse_loss(student(x), dense(x).detach()).backward()
        optimizer.step()

    with recovery.keep_zeros(student) as names:
        assert names == ["1.weight", "3.weight"]
        for _ in range(5):
            step()
    assert all(torch.equal(before[name], now) for name, now in zeros(student).items())
    step()
    assert any(not torch.equal(before[name], now) for name, now in zeros(student).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pruned_block_comes_nearer_to_the_dense_one_and_keeps_its_zeros(dtype):
    dense = block(dtype)
    student = pruned(dense)
    before = zeros(student)
    inputs = [torch.randn(32, 16).to(dtype) for _ in range(4)]
    errors = recovery.tune_block(student, dense, inputs, passes=20, learning_rate=3e-3)
    assert errors[1] < 0.7 * errors[0]
    assert all(torch.equal(before[name], now) for name, now in zeros(student).items())
    assert all(p.dtype == dtype and p.grad is None for p in student.parameters())
    found = recovery._error(student(inputs[0]), dense(inputs[0])).detach()
    assert float(found) == pytest.approx(errors[1], rel=1e-4)


def test_a_block_is_run_as_the_caller_says_and_stays_where_tuning_makes_it_worse():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block()

        def forward(self, x, scale):
            return scale * self.inner(x), None

    dense = Layer()
    student = pruned(dense)
    state = copy.deepcopy(student.state_dict())
    inputs, call = [torch.randn(2, 8, 16)], lambda module, x: module(x, scale=2.0)
    before, after = recovery.tune_block(student, dense, inputs, learning_rate=1e4, passes=1, call=call)
    assert not after < before
    assert all(torch.equal(state[name], now) for name, now in student.state_dict().items())
    before, after = recovery.tune_block(student, dense, inputs, [inputs[0] + 0.01], passes=10, call=call)
    assert after < before
    for words, arguments, options in [
        ("0 inputs", ([],), {}),
        ("1 inputs of the block and 2", (inputs, inputs * 2), {}),
        ("passes", (inputs,), {"passes": 0}),
        ("passes", (inputs,), {"learning_rate": float("nan")}),
    ]:
        with pytest.raises(ValueError, match=words):
            recovery.tune_block(student, dense, *arguments, call=call, **options)
    with pytest.raises(ValueError, match="requires gradients"):
        recovery.tune_block(student.requires_grad_(False), dense, inputs, call=call)
