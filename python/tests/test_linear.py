"""twofour.Linear: computing, moving, saving, loading, compiling."""

import copy
import io
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import close
from torch import nn
from torch._inductor.utils import run_and_get_code

import twofour
from twofour.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 128), (16, 4), (37, 70), (1, 3), (100, 33)]


def layer(out_features=37, in_features=70, bias=True, dtype=torch.float32, device="cpu"):
    dense = nn.Linear(in_features, out_features, bias).to(device, dtype)
    return twofour.Linear.from_dense(dense, prune=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_backward_are_those_of_the_dense_layer(device, dtype, shape, bias):
    sparse = layer(*shape, bias, dtype, device)
    dense = sparse.to_dense()
    assert twofour.verify(dense.weight)
    x = torch.randn(2, 5, shape[1], device=device).to(dtype).requires_grad_()
    same = x.detach().double().requires_grad_()
    y = sparse(x)
    expected = F.linear(same, dense.weight.double(), dense.bias.double() if bias else None)
    close(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    close(x.grad, same.grad)
    if bias:
        close(sparse.bias.grad, dy.double().sum((0, 1)))
    with torch.no_grad():
        assert torch.equal(sparse(x), y)


def test_from_dense_prunes_where_asked_and_names_what_is_not_2_4(device):
    dense = nn.Linear(64, 32).to(device)
    sparse = twofour.Linear.from_dense(dense, prune=True)
    assert sparse.bias is dense.bias
    assert torch.equal(sparse.to_dense().weight, twofour.prune(dense.weight))
    with pytest.raises(ValueError, match="tensor `up`: row 0, group 0: 4 non-zeros"):
        twofour.Linear.from_dense(dense, name="up")
    again = twofour.Linear.from_dense(sparse.to_dense())
    assert torch.equal(again.weight_values, sparse.weight_values)
    with pytest.raises(NotImplementedError, match="float64"):
        twofour.Linear.from_dense(nn.Linear(8, 8).double())
    assert not twofour.Linear.from_dense(dense.eval(), prune=True).training


def test_the_weight_is_held_once(device):
    # On a GPU 32-bit weights are dense.
    sparse = layer(256, 256, device=device).to(torch.bfloat16)
    assert [name for name, _ in sparse.named_buffers()] == ["weight_packed"]
    assert sum(buffer.nbytes for buffer in sparse.buffers()) < 0.6 * 256 * 256 * 2
    assert isinstance(sparse.weight, SparseSemiStructuredTensor)
    assert sparse.weight.packed_weight.forward is sparse.weight_packed.plain


def test_a_new_layer_is_zero(device):
    for shape in SHAPES:
        sparse = twofour.Linear(shape[1], shape[0], device=device)
        assert not sparse(torch.randn(3, shape[1], device=device)).any()
        assert torch.equal(sparse.weight_meta, twofour.compress(torch.zeros(shape, device=device)).meta)


def test_state_dicts(device):
    sparse = layer(device=device)
    state = sparse.state_dict()
    assert {name: (t.shape, t.dtype) for name, t in state.items()} == {
        "weight_values": ((37, 36), torch.float32),
        "weight_meta": ((37, 3), torch.int32),
        "bias": ((37,), torch.float32),
    }
    reference = twofour.compress(sparse.to_dense().weight)
    assert torch.equal(state["weight_values"], reference.values) and torch.equal(state["weight_meta"], reference.meta)
    x = torch.randn(4, 70, device=device)
    for given in (
        state,
        {"weight": sparse.to_dense().weight, "bias": sparse.bias},
        {"weight": sparse.weight, "bias": sparse.bias},
    ):
        other = layer(device=device)
        other.load_state_dict(given)
        assert torch.equal(other(x), sparse(x))
    half = layer(dtype=torch.bfloat16, device=device)
    half.load_state_dict(state)
    assert half.weight_values.dtype == torch.bfloat16 and half.bias.dtype == torch.bfloat16
    on_meta = twofour.Linear(70, 37, device="meta")
    assert {name: t.shape for name, t in on_meta.state_dict().items()} == {name: t.shape for name, t in state.items()}
    on_meta.load_state_dict(state, assign=True)
    assert torch.equal(on_meta(x), sparse(x))
    nested = nn.Sequential(layer(device=device), nn.ReLU(), layer(8, 37, device=device))
    other = nn.Sequential(layer(device=device), nn.ReLU(), layer(8, 37, device=device))
    assert not torch.equal(other(x), nested(x))
    other.load_state_dict(nested.state_dict())
    assert torch.equal(other(x), nested(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("weight_meta"), r'Missing key\(s\) in state_dict: "weight_meta"'),
        (lambda s: s.pop("bias"), r'Missing key\(s\) in state_dict: "bias"'),
        (lambda s: s.update(more=torch.zeros(1)), r'Unexpected key\(s\) in state_dict: "more"'),
        (lambda s: s["weight_meta"].zero_(), "weight: row 0, group 0: metadata code 0x0"),
        (
            lambda s: s.update(weight_values=torch.zeros(37, 35)),
            r"weight_values of a weight \[37, 70\] has shape \[37, 36\]",
        ),
        (lambda s: s.update(weight=torch.ones(37, 70)), "weight: row 0, group 0: 4 non-zeros"),
        (lambda s: s.update(weight=torch.ones(37, 71)), r"its shape is \[37, 71\], not \[37, 70\]"),
    ],
)
def test_state_dicts_that_do_not_fit(change, message):
    sparse = layer()
    before = sparse.to_dense().weight
    state = sparse.state_dict()
    change(state)
    with pytest.raises(RuntimeError, match=message):
        sparse.load_state_dict(state)
    assert torch.equal(sparse.to_dense().weight, before)


def test_copies(device):
    sparse = layer(device=device)
    x = torch.randn(4, 70, device=device)
    buffer = io.BytesIO()
    torch.save(sparse, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), sparse(x))
        assert other.weight_packed.data_ptr() != sparse.weight_packed.data_ptr()
        assert [name for name, _ in other.named_buffers()] == ["weight_packed"]


def test_moving(device):
    sparse = layer()
    dense = sparse.to_dense()
    sparse = sparse.to(device)
    assert sparse.weight_packed.device.type == device
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        moved = copy.deepcopy(sparse).to(dtype)
        assert moved.weight_packed.dtype == moved.bias.dtype == dtype
        assert torch.equal(moved.to_dense().weight.cpu(), dense.weight.to(dtype))
    half = copy.deepcopy(sparse).half()
    assert half(torch.randn(2, 70, device=device).half()).dtype == torch.float16
    with pytest.raises(NotImplementedError, match="float64"):
        copy.deepcopy(sparse).double()
    packed = sparse.weight_packed
    assert sparse.to(device).weight_packed is packed
    state = sparse.state_dict()
    gone = sparse.to("meta")
    assert gone.weight_values.device.type == "meta"
    with pytest.raises(RuntimeError, match="load it first"):
        gone(torch.zeros(1, 70))
    back = gone.to_empty(device=device)
    back.load_state_dict(state)
    assert torch.equal(back.to_dense().weight.cpu(), dense.weight)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, requires_grad, dynamic):
    model = nn.Sequential(layer(device=device), nn.ReLU(), layer(8, 37, False, device=device))
    if not requires_grad:
        model.requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (3, 5):
        x = torch.randn(tokens, 70, device=device, requires_grad=requires_grad)
        y, expected = compiled(x), model(x)
        torch.testing.assert_close(y, expected)
        if requires_grad:
            (gradient,) = torch.autograd.grad(y.sum(), x)
            (same,) = torch.autograd.grad(expected.sum(), x)
            torch.testing.assert_close(gradient, same)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_compiled_layers_follow_autocast_and_refuse_what_eager_ones_do(device, requires_grad):
    dense = nn.Linear(70, 37).to(device)
    sparse = twofour.Linear.from_dense(dense, prune=True)
    dense.weight = nn.Parameter(to_sparse_semi_structured(dense.weight, prune=True), requires_grad=False)
    x = torch.randn(6, 70, device=device, requires_grad=requires_grad)
    for model in (sparse, dense):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.autocast(device, dtype=torch.bfloat16):
            found, expected = compiled(x), model(x)
        assert found.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(found, expected)
        if requires_grad:
            gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
            torch.testing.assert_close(*gradients)
        for wrong, message in ((torch.randn(6, 71, device=device), r"\b70\b|70x37"), (x.double(), "float64|[dD]ouble")):
            for call in (model, compiled):
                with pytest.raises(Exception, match=message):
                    call(wrong)


def test_autocast_and_bad_input(device):
    sparse = layer(dtype=torch.bfloat16, device=device)
    x = torch.randn(3, 70, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(sparse(x), sparse(x.bfloat16()))
    with pytest.raises((RuntimeError, NotImplementedError), match="float32"):
        sparse(x)
    with pytest.raises(RuntimeError, match="in_features = 70"):
        sparse(torch.randn(3, 71, device=device).bfloat16())
    assert sparse(torch.randn(0, 70, device=device).bfloat16()).shape == (0, 37)
    assert sparse(torch.randn(70, device=device).bfloat16()).shape == (37,)


def test_it_is_what_a_sparse_weight_gives(device):
    dense = nn.Linear(70, 37).to(device)
    sparse = twofour.Linear.from_dense(dense, prune=True)
    dense.weight = nn.Parameter(to_sparse_semi_structured(dense.weight, prune=True), requires_grad=False)
    x = torch.randn(6, 70, device=device)
    assert torch.equal(dense(x), sparse(x))


def test_inductor_computes_a_kept_activation_once():
    weight = to_sparse_semi_structured(torch.randn(64, 128), prune=True)

    def up(x):
        y = 2 * x + 1
        return F.linear(y, weight), y.reshape(-1, 128)

    x = torch.randn(2, 16, 128)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        found, (code, *_) = run_and_get_code(torch.compile(up), x)
    close(found[0], up(x)[0])
    # The kernel's call: its input and one output.
    (call,) = re.findall(r"cpp_fused\w*\((.*)\)", code[code.index("def call") :])
    assert len(call.split(",")) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_without_input_features_returns_its_bias(device, dtype):
    sparse = twofour.Linear(0, 8, device=device, dtype=dtype)
    torch.nn.init.normal_(sparse.bias)
    assert torch.equal(sparse(torch.randn(3, 0, device=device, dtype=dtype)), sparse.bias.detach().expand(3, 8))


def test_a_module_with_a_sparse_weight_moves_between_types_and_devices(device):
    layer = torch.nn.Linear(64, 32, device=device)
    layer.weight = torch.nn.Parameter(to_sparse_semi_structured(layer.weight, prune=True))
    dense = layer.weight.to_dense()
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16 and torch.equal(layer.weight.to_dense(), dense.bfloat16())
    layer.cpu()
    assert layer.weight.device.type == "cpu" and torch.equal(layer.weight.to_dense(), dense.bfloat16().cpu())
    layer.to(device)
    x = torch.randn(3, 64, device=device, dtype=torch.bfloat16)
    close(layer(x), x.double() @ dense.bfloat16().double().t() + layer.bias.double())


def test_sparse_tensors_are_swapped():
    first, second = (to_sparse_semi_structured(torch.randn(32, 64), prune=True) for _ in range(2))
    dense = [first.to_dense(), second.to_dense()]
    torch.utils.swap_tensors(first, second)
    assert torch.equal(first.to_dense(), dense[1]) and torch.equal(second.to_dense(), dense[0])
