"""2:4 weights of 4-bit integers."""

import copy
import io
import pickle

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from conftest import close

import twofour
from twofour import operators
from twofour.quantization import (
    Int4Linear,
    Int4WeightOnlyConfig,
    MarlinSparseLayout,
    SemiSparseLayout,
    int4_weight_only,
)

GROUP_SIZES = [128, -1]


def layer_of(device, dtype, out_features=36, in_features=264, group_size=128, bias=True):
    """An int4 layer, and its dense one."""
    dense = torch.nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
    return Int4Linear.from_dense(dense, group_size, prune=True), dense


def types_of(device):
    return [torch.bfloat16, torch.float16] + ([torch.float32] if device == "cpu" else [])


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("shape", [(16, 128), (36, 264), (7, 30), (64, 1200), (1, 4)])
def test_integers_and_scales_are_those_of_a_loop(shape, group_size):
    rows, cols = shape
    dense = twofour.sparse.to_sparse_semi_structured(torch.randn(shape), prune=True).to_dense()
    layer = Int4Linear.from_dense(_linear(dense), group_size)
    width = cols if group_size == -1 else 128
    expected = torch.zeros(shape)
    for row in range(rows):
        for first in range(0, cols, width):
            part = dense[row, first : first + width]
            scale = (part.abs().max() / 7).half().float()
            expected[row, first : first + width] = (part / scale).round().clamp(-8, 7) * scale if scale else 0
    assert torch.equal(layer.to_dense(), expected)
    values, meta, scales = layer.canonical()
    assert values.dtype == torch.uint8 and tuple(values.shape) == (rows, -(-cols // 4))
    assert tuple(scales.shape) == (rows, 1 if group_size == -1 else -(-cols // 128))
    again = operators.canonical_int4(
        operators.pack_int4(values, meta, scales, cols, group_size), rows, cols, group_size
    )
    assert all(torch.equal(a, b) for a, b in zip((values, meta, scales), again, strict=True))


def _linear(weight, bias=None):
    linear = torch.nn.Linear(
        weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device, dtype=weight.dtype
    )
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(36, 264), (64, 128), (33, 1300), (7, 30)])
def test_a_layer_is_the_dense_one_of_its_dequantized_weight(device, shape, bias, group_size):
    for dtype in types_of(device):
        layer, dense = layer_of(device, dtype, *shape, group_size, bias)
        weight = layer.to_dense().double()
        for size in [(1,), (5,), (3, 50), (130,), (2, 150), ()]:
            x = torch.randn(*size, shape[1], device=device, dtype=dtype)
            y = layer(x)
            assert y.dtype == dtype and tuple(y.shape) == (*size, shape[0])
            close(y, F.linear(x.double(), weight, dense.bias.double() if bias else None))
        assert layer(x.new_empty(0, shape[1])).shape == (0, shape[0])
        # Operands that are not contiguous.
        strided = torch.randn(shape[1], 9, device=device, dtype=dtype).t()
        close(layer(strided), F.linear(strided.double(), weight, dense.bias.double() if bias else None))


def test_quantization_keeps_the_signal(device):
    layer, dense = layer_of(device, torch.bfloat16, 256, 512)
    pruned = twofour.sparse.to_sparse_semi_structured(dense.weight.detach().cpu(), prune=True).to_dense().double()
    noise = layer.to_dense().double().cpu() - pruned
    # torchao's bar for these weights is 20 dB on results.
    assert 10 * torch.log10(pruned.square().sum() / noise.square().sum()) > 18


@pytest.mark.parametrize(
    "config", [MarlinSparseLayout(), int4_weight_only(prune=True), Int4WeightOnlyConfig(group_size=-1, prune=True)]
)
def test_quantize_replaces_layers_and_their_state_survives(device, config):
    def model():
        layers = torch.nn.Sequential(torch.nn.Linear(256, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32))
        if isinstance(config, MarlinSparseLayout):
            for layer in (layers[0], layers[2]):
                twofour.sparsity.apply_fake_sparsity(layer)
        return layers.to(device, torch.bfloat16)

    first, second = twofour.quantize_(model(), config), twofour.quantize_(model(), config)
    x = torch.randn(4, 256, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = first(x)
        assert not torch.equal(second(x), expected)
        second.load_state_dict(first.state_dict())
        assert torch.equal(second(x), expected)
        buffer = io.BytesIO()
        torch.save(first.state_dict(), buffer)
        buffer.seek(0)
        stored = safetensors.torch.load(safetensors.torch.save(first.state_dict()))
        assert stored["0.weight_values"].numel() == 96 * 64
        for state in (torch.load(buffer, weights_only=True), stored):
            third = twofour.quantize_(model(), config)
            third.load_state_dict(state)
            assert torch.equal(third(x), expected)
        for same in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
            assert torch.equal(same(x), expected)
        close(torch.compile(first, fullgraph=True, backend="aot_eager")(x), expected)
        half = copy.deepcopy(first).half()
        assert half(x.half()).dtype == torch.float16
        with torch.autocast(device, torch.bfloat16):
            assert first(x.float()).dtype == torch.bfloat16


def test_the_input_has_a_gradient(device):
    for dtype in types_of(device):
        layer, _ = layer_of(device, dtype)
        x = torch.randn(2, 3, 264, device=device, dtype=dtype, requires_grad=True)
        dy = torch.randn(2, 3, 36, device=device, dtype=dtype)
        layer(x).backward(dy)
        close(x.grad, dy.double() @ layer.to_dense().double())


def test_bad_input_is_an_exception(device):
    dtype = torch.bfloat16
    layer, dense = layer_of(device, dtype)
    with pytest.raises(ValueError, match=r"0\.weight: row 0, group 0"):
        twofour.quantize_(torch.nn.Sequential(dense), MarlinSparseLayout())
    with pytest.raises(RuntimeError, match="in_features = 264"):
        layer(torch.randn(2, 260, device=device, dtype=dtype))
    with pytest.raises(RuntimeError, match="in_features = 264"):
        layer(torch.tensor(1.0, device=device, dtype=dtype))
    with pytest.raises(NotImplementedError, match="not supported"):
        layer(torch.randn(2, 264, device=device, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        operators.linear_int4(torch.randn(2, 264, device=device, dtype=dtype), layer.packed, 100, 128)
    with pytest.raises(NotImplementedError, match="int8 is required"):
        operators.linear_int4(torch.randn(2, 264, device=device, dtype=dtype), layer.packed.plain.int(), 36, 128)
    with pytest.raises(RuntimeError, match="group_size is 64"):
        operators.linear_int4(torch.randn(2, 264, device=device, dtype=dtype), layer.packed, 36, 64)
    values, meta, scales = layer.canonical()
    with pytest.raises(RuntimeError, match="an int4 weight of shape"):
        operators.pack_int4(values, meta, scales[:, :1].contiguous(), 264, 128)
    with pytest.raises(RuntimeError, match="Missing key.*0.weight_scales"):
        torch.nn.Sequential(layer).load_state_dict(
            {"0.weight_values": values, "0.weight_meta": meta, "0.bias": layer.bias}
        )
    state = torch.nn.Sequential(layer).state_dict() | {"0.weight_meta": torch.zeros_like(meta)}
    with pytest.raises(RuntimeError, match="0.weight: "):
        torch.nn.Sequential(layer).load_state_dict(state)
    for broken, message in ((torch.inf, "row 3"), (torch.nan, "row 3"), (1e8, "row 3")):
        bad = torch.nn.Linear(8, 8)
        with torch.no_grad():
            bad.weight[3, 2] = broken
        with pytest.raises(ValueError, match=message):
            Int4Linear.from_dense(bad, prune=True)


def test_bad_configurations_are_exceptions():
    with pytest.raises(ValueError, match="group_size is 64"):
        int4_weight_only(group_size=64)
    with pytest.raises(ValueError, match="group_size is 32"):
        Int4Linear.from_dense(torch.nn.Linear(8, 8), group_size=32)
    with pytest.raises(ValueError, match="marlin_sparse"):
        Int4WeightOnlyConfig(int4_packing_format="plain")
    with pytest.raises(TypeError, match="MarlinSparseLayout"):
        int4_weight_only(layout=SemiSparseLayout())
    with pytest.raises(TypeError, match="unknown configuration"):
        twofour.quantize_(torch.nn.Sequential(torch.nn.Linear(4, 4)), object())
    with pytest.raises(NotImplementedError, match=r"0\.weight: .*float64"):
        twofour.quantize_(torch.nn.Sequential(torch.nn.Linear(4, 4).double()), int4_weight_only())


def test_warm_knows_int4_layers(device):
    model = torch.nn.Sequential(*(layer_of(device, torch.bfloat16, bias=bias)[0] for bias in (True, False)))
    assert twofour.warm(model, tokens=[1, 5]) == 2
