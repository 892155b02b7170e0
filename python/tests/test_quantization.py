"""2:4 weights of 8-bit integers."""

import copy

import pytest
import torch
from conftest import close

import twofour
from twofour import operators
from twofour.quantization import (
    MarlinSparseLayout,
    QuantizedLinear,
    SemiSparseLayout,
    int8_dynamic_activation_int8_weight,
)


def integers(rows, cols, device):
    """A 2:4 matrix of int8 with all sorts of nonzeros, the extreme ones among them."""
    dense = torch.randint(-128, 128, (rows, cols), dtype=torch.int8)
    dense[0, 0] = -128
    mask = twofour.sparse.to_sparse_semi_structured(dense.float() + 0.5, prune=True).to_dense() != 0
    return (dense * mask).to(device)


@pytest.mark.parametrize("shape", [(32, 32), (16, 128), (20, 52), (7, 30)])
def test_integers_compress_and_multiply_exactly(shape):
    dense = integers(*shape, "cpu")
    sparse = twofour.sparse.to_sparse_semi_structured(dense)
    assert torch.equal(sparse.to_dense(), dense)
    for tokens in (1, 5, 40):
        x = torch.randint(-128, 128, (tokens, shape[1]), dtype=torch.int8)
        exact = x.long() @ dense.long().t()
        assert torch.equal(operators.linear_i8(x, sparse.packed_weight.forward, shape[0]).long(), exact)
        assert torch.equal(torch.mm(x, sparse.t()), exact.to(torch.int8))
        assert torch.equal(torch.mm(sparse, x.t()), exact.t().to(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_quantized_layer_is_the_dense_one_of_its_rounded_numbers(device, dtype, bias):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("GPU kernels take 16-bit activations")
    linear = torch.nn.Linear(70, 36, bias=bias, device=device, dtype=dtype)
    layer = QuantizedLinear.from_dense(linear, prune=True)
    x = torch.randn(3, 5, 70, device=device, dtype=dtype)
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    rounded = (x.double() / scale).round() * scale
    expected = rounded @ layer.to_dense().double().t() + (linear.bias.double() if bias else 0)
    # A value at the middle of two integers may be rounded to either, since the scale is a float.
    close(layer(x), expected, torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    pruned = twofour.sparse.to_sparse_semi_structured(linear.weight.detach().float().cpu(), prune=True).to_dense()
    assert (layer.to_dense().cpu() - pruned).abs().max() <= pruned.abs().max() / 127 * 0.51


def test_quantize_replaces_layers_and_their_state_survives(device):
    dtype = torch.bfloat16
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32)).to(device, dtype)
    with pytest.raises(ValueError, match=r"0\.weight: row 0, group 0"):
        twofour.quantize_(model, int8_dynamic_activation_int8_weight(layout=SemiSparseLayout()))
    assert isinstance(model[0], torch.nn.Linear)
    x = torch.randn(9, 64, device=device, dtype=dtype)
    twofour.quantize_(model, int8_dynamic_activation_int8_weight(prune=True))
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    other = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32)).to(device, dtype)
    twofour.quantize_(other, int8_dynamic_activation_int8_weight(prune=True))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)
    close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    half = copy.deepcopy(model).half()
    assert half(x.half()).dtype == torch.float16
    close(half(x.half()), expected, dtype)


def test_bad_input_is_an_exception():
    with pytest.raises(ValueError, match="no linear layer"):
        twofour.quantize_(torch.nn.Linear(4, 4), int8_dynamic_activation_int8_weight())
    with pytest.raises(TypeError, match="unknown configuration"):
        twofour.quantize_(torch.nn.Sequential(torch.nn.Linear(4, 4)), object())
    broken = torch.nn.Linear(8, 8)
    with torch.no_grad():
        broken.weight[3, 2] = torch.inf
    with pytest.raises(ValueError, match="row 3"):
        QuantizedLinear.from_dense(broken, prune=True)
    layer = QuantizedLinear.from_dense(torch.nn.Linear(8, 8), prune=True)
    with pytest.raises(RuntimeError, match="must be in_features = 8"):
        layer(torch.randn(2, 9))


@pytest.mark.parametrize("quantize", [SemiSparseLayout(), MarlinSparseLayout()])
def test_a_weight_that_is_read_is_the_dense_one_in_the_type_of_the_layer(quantize, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(128, 16, bias=False)).to(torch.float16)
    twofour.sparsity.apply_fake_sparsity(model)
    layer = twofour.quantize_(model, quantize)[0]
    dense = layer.to_dense()
    with monkeypatch.context() as patched:
        # Its properties are known without it.
        patched.setattr(type(layer), "to_dense", None)
        weight = layer.weight
        assert (weight.dtype, weight.shape, weight.device.type, weight.dim()) == (torch.float16, (16, 128), "cpu", 2)
        assert not weight.requires_grad and weight.is_floating_point() and weight.size(1) == 128
    x = torch.randn(3, 128, dtype=torch.float16)
    for read in (
        lambda w: w,
        lambda w: w.data,
        lambda w: w.detach().clone(),
        lambda w: w.to(torch.float16),
        lambda w: w.T.T,
        copy.deepcopy,
    ):
        assert torch.equal(torch.as_tensor(read(layer.weight)) + 0, dense.half())
    assert torch.equal(torch.nn.functional.linear(x, layer.weight), x @ dense.half().T)
    assert layer.weight.tolist() == dense.half().tolist() and (layer.weight.numpy() == dense.half().numpy()).all()
    with pytest.raises(NotImplementedError, match=r"mul_: the weight of a \w+Linear is a dense copy"):
        layer.weight.mul_(2)
    with pytest.raises(NotImplementedError, match="is a dense copy"):
        layer.weight.data = x
    # It follows the model.
    assert model.to(torch.bfloat16)[0].weight.dtype is copy.deepcopy(model)[0].weight.dtype is torch.bfloat16
