"""Threads, forked children, memory, and input of any kind."""

import os
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twofour.sparse import to_sparse_semi_structured


def weight_and_input(rows=256, cols=128, tokens=40):
    weight = to_sparse_semi_structured(torch.randn(rows, cols), prune=True)
    return weight, torch.randn(tokens, cols)


#: A GEMM that is worth a second thread, with few tokens and with many.
SHARED = [(1024, 1024, 8), (512, 512, 128)]


@pytest.fixture
def two_threads():
    """As many threads of torch, which compute for these tests, too, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHARED)
def test_threads_multiply_at_once(two_threads, shape):
    weight, x = weight_and_input(*shape)
    expected = F.linear(x, weight)
    wrong = []

    def work():
        for i in range(50):
            if not torch.equal(F.linear(x, weight), expected):
                wrong.append(1)
            if i % 10 == 0:
                to_sparse_semi_structured(weight.to_dense())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is for Unix")
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("shape", SHARED)
def test_a_forked_child_computes(two_threads, shape):
    """As a DataLoader's worker: no thread of the parent's pools came along, nor one of torch's, for which GNU's OpenMP
    would wait for ever."""
    weight, x = weight_and_input(*shape)
    expected = F.linear(x, weight)
    torch.randn(512, 512).exp_()
    child = os.fork()
    if child == 0:
        try:
            # Not by torch, whose parallel loops wait for ever here.
            same = F.linear(x, weight).numpy().tobytes() == expected.numpy().tobytes()
            packed = to_sparse_semi_structured(torch.randn(64, 64), prune="greedy")
            os._exit(0 if same and packed.shape == (64, 64) else 1)
        except BaseException:
            os._exit(2)
    import time

    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("the child did not finish")


@pytest.mark.parametrize("shape", SHARED)
def test_threads_follow_torch(two_threads, shape):
    weight, x = weight_and_input(*shape)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [F.linear(x, weight) for _ in range(5)]
    assert all(torch.equal(results[0], result) for result in results)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="requires /proc")
def test_ten_thousand_calls_leak_nothing_and_failing_ones_neither():
    weight, x = weight_and_input()
    wrong = torch.randn(40, 200)
    operator, packed = torch.ops.twofour.linear.default, weight.packed_weight.forward

    def calls(count):
        for _ in range(count):
            F.linear(x, weight)
            try:
                operator(wrong, packed, 256)
            except RuntimeError:
                pass
            else:
                raise AssertionError("a wrong shape was taken")

    calls(500)
    before = resident()
    calls(10_000)
    # A result has 40 KB: 10,000 of them would be 400 MB, and as many messages 2 MB.
    assert resident() - before < 1 << 20


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = (torch.randn(shape) * 100).to(dtype)
    if tensor.dim() >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(-1, -2)
    if (
        tensor.is_floating_point()
        and tensor.dtype.itemsize > 1
        and tensor.numel()
        and tensor.is_contiguous()
        and draw(st.booleans())
    ):
        tensor.view(-1)[0] = draw(st.sampled_from([float("nan"), float("inf"), -0.0]))
    return tensor


NUMBERS = st.one_of(st.integers(-3, 20), st.sampled_from([1 << 31, 1 << 62, -(1 << 63)]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_operators_take_anything_and_return_or_raise(data):
    """Arguments of the schema's types, with any shape, type and value: a result or an exception, never a crash."""
    name = data.draw(st.sampled_from(NAMES))
    operator = getattr(torch.ops.twofour, name).default
    arguments = [data.draw(kind_of(argument)) for argument in operator._schema.arguments]
    try:
        operator(*arguments)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        assert "failed unexpectedly" not in str(error), f"{name} panicked: {error}"


NAMES = [name for name in dir(torch.ops.twofour) if not name.startswith("_") and name != "name"]
KINDS = {
    "Tensor": tensors(),
    "Optional[Tensor]": st.none() | tensors(),
    "List[Tensor]": st.lists(tensors(), max_size=3),
    "int": NUMBERS,
    "float": st.floats(allow_nan=True),
    "bool": st.booleans(),
    "seed": st.one_of(tensors(), st.integers(0, 1 << 62).map(lambda seed: torch.tensor([seed]))),
    "group_size": st.one_of(st.sampled_from([128, -1]), NUMBERS),
}


def kind_of(argument):
    """What an argument may be, by its name where that says more than its type."""
    return KINDS[argument.name if argument.name in KINDS else str(argument.type)]
