"""2:4 tensors of 8-bit floats, and ``torch._scaled_mm`` with them."""

import io

import pytest
import torch
import torch.nn.functional as F

from twofour.sparse import to_sparse_semi_structured

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def pruned(rows: int, cols: int, dtype: torch.dtype, device: str):
    """A 2:4 matrix that its type holds exactly, in float32."""
    return to_sparse_semi_structured(torch.randn(rows, cols, device=device), prune=True).to_dense().to(dtype).float()


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("shape", [(64, 128), (37, 30), (1, 4), (100, 257)])
def test_a_packed_matrix_is_the_matrix(device, dtype, shape):
    dense = pruned(*shape, dtype, device)
    sparse = to_sparse_semi_structured(dense.to(dtype))
    assert sparse.dtype is dtype and sparse.shape == shape
    assert torch.equal(sparse.to_dense().float(), dense)
    assert torch.equal(sparse.t().t().to_dense().float(), dense)
    assert torch.equal(sparse.clone().to("cpu").to_dense().float(), dense.cpu())
    assert torch.equal(sparse.to(torch.bfloat16).to(dtype).to_dense().float(), dense)
    assert torch.equal(sparse.mask & (dense != 0), dense != 0)
    file = io.BytesIO()
    torch.save(sparse, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True).to_dense().float(), dense)


@pytest.mark.parametrize("types", [(FLOAT8[0], FLOAT8[0]), (FLOAT8[1], FLOAT8[0]), (FLOAT8[0], FLOAT8[1])])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("by_row", [False, True])
def test_scaled_mm_is_the_dense_product(device, types, out_dtype, by_row):
    tokens, rows, cols = 24, 96, 160
    dense, x = pruned(rows, cols, types[0], device), torch.randn(tokens, cols, device=device).to(types[1])
    weight = to_sparse_semi_structured(dense.to(types[0]))
    scale_x = torch.rand((tokens, 1) if by_row else (), device=device) + 0.5
    scale_w = torch.rand((rows, 1) if by_row else (), device=device) * 0.02
    bias = torch.randn(rows, device=device).bfloat16()
    expected = (x.double() @ dense.double().t()) * scale_x.double() * scale_w.double().t()
    tolerance = {torch.float32: 2e-3, torch.float8_e4m3fn: 7e-2}.get(out_dtype, 1e-2)

    def close(found, expected):
        assert found.dtype is out_dtype
        assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()

    # A sparse second operand, as in a linear layer, with a bias for each feature.
    y = torch._scaled_mm(x, weight.t(), scale_a=scale_x, scale_b=scale_w.t(), out_dtype=out_dtype)
    close(y, expected)
    close(
        torch._scaled_mm(x, weight.t(), scale_x, scale_w.t(), bias=bias, out_dtype=out_dtype), expected + bias.double()
    )
    # A sparse first operand, as in torch.
    close(torch._scaled_mm(weight, x.t(), scale_w, scale_x.t(), out_dtype=out_dtype), expected.t())
    per_token = torch.randn(tokens, device=device).bfloat16()
    close(
        torch._scaled_mm(weight, x.t(), scale_w, scale_x.t(), bias=per_token, out_dtype=out_dtype),
        expected.t() + per_token.double(),
    )


def test_matrices_are_pruned_by_their_values(device):
    dense = torch.randn(64, 96, device=device).to(torch.float8_e4m3fn)
    for rule in (True, "greedy", "optimal"):
        expected = to_sparse_semi_structured(dense.half(), prune=rule)
        found = to_sparse_semi_structured(dense, prune=rule)
        assert torch.equal(found.to_dense().half(), expected.to_dense())
        assert torch.equal(found.mask, expected.mask)
    mask = to_sparse_semi_structured(torch.randn(64, 96, device=device), prune=True).mask
    masked = to_sparse_semi_structured(dense, mask=mask)
    assert torch.equal(masked.to_dense().half(), dense.half() * mask)
    cast = to_sparse_semi_structured(dense.float(), prune=True, dtype=torch.float8_e4m3fn)
    assert cast.dtype is torch.float8_e4m3fn
    estimate = to_sparse_semi_structured(dense, MVUE24=True, seed=3).to_dense().half()
    assert ((estimate != 0).view(-1, 4).sum(-1) <= 2).all()


def test_what_cannot_be_multiplied_is_refused(device):
    dense = pruned(32, 64, torch.float8_e4m3fn, device).to(torch.float8_e4m3fn)
    weight, one = to_sparse_semi_structured(dense), torch.ones((), device=device)
    x = torch.randn(16, 64, device=device).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="torch._scaled_mm"):
        F.linear(x, weight)
    with pytest.raises(NotImplementedError, match="torch._scaled_mm"):
        weight @ x.t()
    with pytest.raises(NotImplementedError, match="the dense operand has dtype torch.bfloat16"):
        torch._scaled_mm(x.bfloat16(), weight.t(), one, one)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch._scaled_mm(x[:, :32], weight.t(), one, one)
    with pytest.raises(RuntimeError, match="scales must be float32"):
        torch._scaled_mm(x, weight.t(), torch.ones(3, device=device), one)
    with pytest.raises(RuntimeError, match="scales must be float32"):
        torch._scaled_mm(x, weight.t(), one.double(), one)
    with pytest.raises(NotImplementedError, match="out_dtype"):
        torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.int8)
    with pytest.raises(ValueError, match="both|Sparse"):
        torch._scaled_mm(weight, weight.t(), one, one)
    with pytest.raises(ValueError, match="row 3"):
        bad = dense.half()
        bad[3] = 1
        to_sparse_semi_structured(bad.to(torch.float8_e4m3fn))


def test_compiled(device):
    weight = to_sparse_semi_structured(pruned(64, 128, torch.float8_e4m3fn, device).to(torch.float8_e4m3fn))
    x, one = torch.randn(32, 128, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)

    def product(x, weight):
        return torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), product(x, weight))
