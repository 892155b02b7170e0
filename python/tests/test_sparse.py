"""Sparse tensors: making, multiplying, differentiating, saving."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import close

from twofour.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
    to_sparse_semi_structured,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALGORITHMS = ["", "largest_values_greedy", "largest_abs_values_greedy", "causal1122", "optimal"]


def pruned(rows, cols, dtype=torch.float32, device="cpu"):
    dense = torch.randn(rows, cols, device=device).to(dtype)
    return to_sparse_semi_structured(dense, prune=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4), (16, 16), (100, 52), (256, 128), (37, 70), (8, 3)])
def test_a_compressed_matrix_decompresses_to_itself(device, shape, dtype):
    dense = torch.randn(shape, device=device).to(dtype)
    sparse = to_sparse_semi_structured(dense, prune=True)
    kept = sparse.to_dense()
    padded = F.pad(dense, (0, -shape[1] % 4)).view(shape[0], -1, 4)
    order = padded.abs().float().argsort(dim=-1, descending=True, stable=True)
    mask = (
        torch.zeros_like(padded, dtype=torch.bool).scatter_(-1, order[..., :2], True).view(shape[0], -1)[:, : shape[1]]
    )
    assert torch.equal(kept, dense * mask)
    assert torch.equal(to_sparse_semi_structured(kept).to_dense(), kept)
    assert (sparse.shape, sparse.dtype, sparse.device) == (dense.shape, dense.dtype, dense.device)
    assert isinstance(sparse, torch.sparse.SparseSemiStructuredTensor)


def test_negative_zero_is_zero():
    dense = torch.tensor([[1.0, -0.0, 2.0, -0.0]])
    assert torch.equal(to_sparse_semi_structured(dense).to_dense(), torch.tensor([[1.0, 0.0, 2.0, 0.0]]))
    assert not to_sparse_semi_structured(dense).to_dense().signbit().any()


def test_data_that_is_not_2_4_is_an_error_that_names_the_place():
    dense = torch.zeros(8, 16)
    dense[5, 8:11] = 1
    with pytest.raises(ValueError, match="row 5, group 2"):
        to_sparse_semi_structured(dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(), (1,), (5,), (64,), (3, 7), (2, 1, 4), (0,)])
def test_linear(device, dtype, leading):
    weight = pruned(100, 52, dtype, device)
    x = torch.randn(*leading, 52, device=device).to(dtype)
    bias = torch.randn(100, device=device).to(dtype)
    dense = weight.to_dense().double()
    close(F.linear(x, weight), F.linear(x.double(), dense)) if x.numel() else None
    assert F.linear(x, weight).shape == (*leading, 100)
    if x.numel():
        close(F.linear(x, weight, bias), F.linear(x.double(), dense, bias.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_four_products_of_a_matrix_pruned_by_tiles(device, dtype, algorithm):
    dense = torch.randn(64, 256, device=device).to(dtype)
    for cls in (SparseSemiStructuredTensorCUTLASS, SparseSemiStructuredTensorCUSPARSELT):
        a = cls.prune_dense_static_sort(dense, algorithm)
        kept = a.to_dense().double()
        right, left = torch.randn(256, 33, device=device).to(dtype), torch.randn(21, 64, device=device).to(dtype)
        close(a @ right, kept @ right.double())
        close(left @ a, left.double() @ kept)
        close(a.t() @ left.t(), kept.t() @ left.double().t())
        close(right.t() @ a.t(), right.double().t() @ kept.t())


def test_products_of_a_matrix_packed_one_way_and_of_other_ranks(device):
    a = pruned(24, 40, device=device)
    kept = a.to_dense().double()
    for right in (torch.randn(40, device=device), torch.randn(3, 40, 5, device=device)):
        close(a @ right, kept @ right.double())
    for left in (torch.randn(24, device=device), torch.randn(2, 3, 24, device=device)):
        close(left @ a, left.double() @ kept)
    with pytest.raises(ValueError, match="not supported by the hardware"):
        a @ a.t()
    with pytest.raises(NotImplementedError, match="same data type"):
        a @ torch.randn(40, 2, device=device, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        a @ torch.randn(41, 2, device=device)
    bias = torch.randn(40, device=device)
    close(torch.addmm(bias, torch.randn(3, 24, device=device) * 0 + 1, a), bias.double() + kept.sum(0).expand(3, -1))


@pytest.mark.parametrize("both_ways", [False, True])
def test_gradients_are_those_of_the_dense_layer_with_the_kept_weight(device, both_ways):
    dense = torch.randn(48, 36, device=device, dtype=torch.float32)
    weight = (
        SparseSemiStructuredTensor.prune_dense_static_sort(dense)
        if both_ways
        else to_sparse_semi_structured(dense, prune=True)
    )
    weight = torch.nn.Parameter(weight)
    bias = torch.randn(48, device=device, requires_grad=True)
    x = torch.randn(2, 5, 36, device=device, requires_grad=True)
    dy = torch.randn(2, 5, 48, device=device)
    F.linear(x, weight, bias).backward(dy)
    reference = [
        t.detach().to_dense().double() if isinstance(t, SparseSemiStructuredTensor) else t.detach().double()
        for t in (x, weight, bias)
    ]
    for t in reference:
        t.requires_grad_()
    F.linear(*reference).backward(dy.double())
    for found, expected in zip((x, weight, bias), reference, strict=True):
        close(found.grad, expected.grad)


def test_expanded_gradients_and_transposed_inputs(device):
    weight = pruned(32, 16, device=device)
    x = torch.randn(16, 5, device=device).t().requires_grad_()
    F.linear(x, weight).sum().backward()
    close(x.grad, weight.to_dense().double().sum(0).expand(5, -1))
    close(F.linear(x, weight), x.double() @ weight.to_dense().double().t())


def test_torchs_layouts_are_bit_for_bit_torchs():
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass as reference

    for dtype in (torch.float16, torch.bfloat16):
        for shape in ((32, 128), (64, 256), (256, 128)):
            sparse = to_sparse_semi_structured(torch.randn(shape).to(dtype), prune="optimal")
            values, meta = reference(sparse.to_dense())
            assert torch.equal(sparse.packed, values) and torch.equal(sparse.meta, meta)
            again = SparseSemiStructuredTensorCUTLASS(
                sparse.shape, values, meta, None, None, sparse.compressed_swizzled_bitmask
            )
            assert torch.equal(again.to_dense(), sparse.to_dense()) and torch.equal(again.mask, sparse.mask)


def test_torchs_documented_tiles():
    tile = torch.tensor([[2, -1, -2, -3], [-1, 8, -1, 6], [-1, -1, 4, 5], [-1, 3, 7, -1]], dtype=torch.float16)
    expected = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)
    padded = torch.ones(32, 64, dtype=torch.float16)
    padded[:4, :4] = tile
    a = SparseSemiStructuredTensorCUTLASS.prune_dense_static_sort(padded)
    assert torch.equal(a.mask[:4, :4], expected)
    assert a.packed[0, :2].tolist() == [2, 0] and a.packed_t[0, :2].tolist() == [2, 0]


def test_a_module_with_a_sparse_weight_copies_saves_and_loads(device):
    layer = torch.nn.Linear(40, 24, device=device)
    layer.weight = torch.nn.Parameter(to_sparse_semi_structured(layer.weight.detach(), prune=True))
    x = torch.randn(3, 40, device=device)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    into_dense = torch.nn.Linear(40, 24, device=device)
    into_dense.load_state_dict(state)
    close(into_dense(x), expected)
    into_sparse = torch.nn.Linear(40, 24, device=device)
    into_sparse.weight = torch.nn.Parameter(pruned(24, 40, device=device))
    into_sparse.load_state_dict(state)
    assert torch.equal(into_sparse(x), expected)


def test_types_and_devices_change(device):
    a = pruned(24, 40, device=device)
    for dtype in DTYPES:
        moved = a.to(dtype)
        assert moved.dtype == dtype and torch.equal(moved.to_dense(), a.to_dense().to(dtype))
    assert torch.equal(a.cpu().to_dense(), a.to_dense().cpu())
    assert torch.equal(a.clone().to_dense(), a.to_dense())
    assert torch.equal(a.bfloat16().float().to_dense(), a.to_dense().bfloat16().float())
    with pytest.raises(NotImplementedError, match="to_dense"):
        a.to(torch.float64)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_compute_the_same(device, backend, dynamic):
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32)).to(device)
    for layer in (model[0], model[2]):
        layer.weight = torch.nn.Parameter(to_sparse_semi_structured(layer.weight.detach(), prune=True))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (4, 9):
        x = torch.randn(tokens, 64, device=device)
        with torch.no_grad():
            close(compiled(x), model(x))
        close(compiled(x.t().contiguous().t()), model(x))


def test_bad_input_is_an_exception(device):
    for bad, error in (
        (torch.randn(4, 4, 4, device=device), "dim = 3"),
        (torch.randn(8, 8, device=device, dtype=torch.float64), "float64"),
        (torch.zeros(8, 8, device=device, dtype=torch.int64), "int64"),
    ):
        with pytest.raises(RuntimeError, match=error):
            to_sparse_semi_structured(bad)
    with pytest.raises(ValueError, match="NaN"):
        to_sparse_semi_structured(torch.full((8, 8), torch.nan, device=device), prune=True)
    with pytest.raises(ValueError, match="unknown mask rule"):
        to_sparse_semi_structured(torch.randn(8, 8, device=device), prune="best")
    with pytest.raises(RuntimeError, match="Unknown algorithm"):
        SparseSemiStructuredTensor.prune_dense_static_sort(torch.randn(8, 8, device=device), "best")
    mask = torch.ones(8, 8, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="row 0, group 0"):
        to_sparse_semi_structured(torch.randn(8, 8, device=device), mask=mask)
    with pytest.raises(RuntimeError, match="the mask has shape"):
        to_sparse_semi_structured(torch.randn(8, 8, device=device), mask=mask[:4])
    weight = pruned(8, 8, device=device)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        F.linear(torch.randn(3, 12, device=device), weight)
    with pytest.raises(NotImplementedError, match="specific set of operations"):
        weight.cos()
    for op, args in (
        (torch.ops.twofour.linear, (torch.randn(3, 8, device=device), weight.packed_weight.forward, -1)),
        (torch.ops.twofour.linear, (torch.randn(3, 8, device=device), weight.packed_weight.forward[:0], 8)),
        (torch.ops.twofour.linear, (torch.randn((), device=device), weight.packed_weight.forward, 8)),
        (torch.ops.twofour.unpack, (weight.packed_weight.forward, 1 << 40, 1 << 40)),
        (torch.ops.twofour.pack, (torch.randn(8, 8, device=device), 99, 1.0, False)),
    ):
        with pytest.raises(RuntimeError):
            op(*args)


def test_an_unbiased_estimate_is_drawn_anew_or_from_a_seed(device):
    dense = torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    drawn = [to_sparse_semi_structured(dense, MVUE24=True).to_dense() for _ in range(2)]
    assert not torch.equal(*drawn)
    fixed = [to_sparse_semi_structured(dense, MVUE24=True, seed=7).to_dense() for _ in range(2)]
    assert torch.equal(*fixed)
    mean = torch.stack([to_sparse_semi_structured(dense, MVUE24=True).to_dense().double() for _ in range(400)]).mean(0)
    assert (mean - dense.double()).abs().mean() < 0.1 * dense.double().abs().mean()
    with pytest.raises(ValueError, match="exclude each other"):
        to_sparse_semi_structured(dense, MVUE24=True, prune=True)


@pytest.mark.parametrize("rule", [True, "greedy", "optimal"])
def test_integers_are_pruned_like_floats(device, rule):
    dense = torch.randint(-128, 128, (37, 30), dtype=torch.int8, device=device)
    sparse = to_sparse_semi_structured(dense, prune=rule)
    assert sparse.dtype is torch.int8
    expected = to_sparse_semi_structured(dense.float(), prune=rule).to_dense()
    assert torch.equal(sparse.to_dense().float(), expected) and (expected == -128).any()
    x = torch.randint(-3, 4, (5, 30), dtype=torch.int8, device=device)
    exact = x.cpu().long() @ expected.cpu().long().t()
    assert torch.equal(F.linear(x, sparse).cpu(), exact.to(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", [30, 257, 3])
def test_the_mask_of_a_matrix_whose_last_group_is_short(device, dtype, cols):
    dense = torch.randn(8, cols, device=device, dtype=dtype)
    sparse = to_sparse_semi_structured(dense, prune=True)
    assert torch.equal(sparse.mask & (sparse.to_dense() != 0), sparse.to_dense() != 0)
    assert torch.equal(sparse.with_values_of(2 * dense).to_dense(), 2 * sparse.to_dense())


def test_floats_are_cast_to_integers_after_they_are_chosen(device):
    dense = torch.tensor([[1.5, -1.75, 1.25, 0.0, 100.9, -128.0, 3.0, 2.0]], device=device).repeat(4, 1)
    sparse = to_sparse_semi_structured(dense, prune=True, dtype=torch.int8)
    assert sparse.to_dense()[0].tolist() == [1, -1, 0, 0, 100, -128, 0, 0]
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1], device=device).expand(4, 8)
    masked = to_sparse_semi_structured(dense, mask=mask, dtype=torch.int8)
    assert masked.to_dense()[0].tolist() == [0, 0, 1, 0, 100, 0, 0, 2]
    integers = to_sparse_semi_structured(dense.to(torch.int8), mask=mask)
    assert torch.equal(integers.to_dense(), masked.to_dense())
    back = to_sparse_semi_structured(dense.to(torch.int8), prune=True, dtype=torch.float32)
    assert back.dtype is torch.float32 and back.to_dense()[0].tolist() == [1, -1, 0, 0, 100, -128, 0, 0]
    for options in ({"prune": True}, {"mask": torch.ones_like(mask) * mask}, {}):
        wrong = torch.zeros(4, 8, device=device)
        wrong[2, 4] = 129.0
        with pytest.raises(ValueError, match="row 2, column 4: 129.0 is outside int8"):
            to_sparse_semi_structured(wrong, dtype=torch.int8, **options)


def test_an_unbiased_estimate_of_integers_has_their_mean(device):
    dense = torch.randint(-63, 64, (16, 16), dtype=torch.int8, device=device)
    for source in (dense, dense.float() / 2):
        drawn = [to_sparse_semi_structured(source, MVUE24=True, dtype=torch.int8).to_dense() for _ in range(600)]
        assert all(t.dtype is torch.int8 for t in drawn)
        error = torch.stack(drawn).double().mean(0) - source.double()
        # A draw's standard deviation is at most about 60; the mean of 600 has a 24th of it, that of all 256 a 392nd.
        assert error.abs().max() < 15 and error.mean().abs() < 0.7
    same = [to_sparse_semi_structured(dense, MVUE24=True, seed=3).to_dense() for _ in range(2)]
    assert torch.equal(*same)
    with pytest.raises(ValueError, match="is outside int8; scale"):
        to_sparse_semi_structured(torch.full((8, 8), 100, dtype=torch.int8, device=device), MVUE24=True)
