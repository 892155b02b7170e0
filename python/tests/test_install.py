"""``twofour.install``: unmodified programs that use ``torch.sparse`` run."""

import pytest
import torch
import torch.nn.functional as F
from conftest import close

import twofour

DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture
def installed():
    with twofour.install():
        yield


def sparse_matrix(rows, cols, dtype, device):
    mask = torch.tensor([0, 0, 1, 1], device=device).tile((rows, cols // 4)).bool()
    return torch.randn(rows, cols, device=device).to(dtype).masked_fill(~mask, 0)


def test_the_names_are_replaced_and_restored():
    before = torch.sparse.to_sparse_semi_structured
    with twofour.install():
        assert torch.sparse.to_sparse_semi_structured is twofour.sparse.to_sparse_semi_structured
        assert twofour.install() is twofour.install()
    assert torch.sparse.to_sparse_semi_structured is before
    twofour.uninstall()
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch._cslt_compress(torch.zeros(32, 32, dtype=torch.float16))


def test_the_tutorials_program_runs(installed, device):
    from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

    SparseSemiStructuredTensor._FORCE_CUTLASS = True
    try:
        mask = torch.Tensor([0, 0, 1, 1]).tile((3072, 256)).to(device).bool()
        linear = torch.nn.Linear(1024, 3072).half().to(device).eval()
        linear.weight = torch.nn.Parameter(mask * linear.weight)
        x = torch.rand(64, 1024, device=device).half()
        with torch.inference_mode():
            dense_output = linear(x)
            linear.weight = torch.nn.Parameter(to_sparse_semi_structured(linear.weight))
            assert torch.allclose(linear(x), dense_output, atol=1e-3, rtol=1e-2)
    finally:
        SparseSemiStructuredTensor._FORCE_CUTLASS = False


@pytest.mark.parametrize("dtype", DTYPES)
def test_functional_cutlass_operators(installed, device, dtype):
    rows, cols, tokens = 64, 128, 40
    weight = sparse_matrix(rows, cols, dtype, device)
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

    values, meta = sparse_semi_structured_from_dense_cutlass(weight)
    x = torch.randn(tokens, cols, device=device).to(dtype)
    bias = torch.randn(rows, device=device).to(dtype)
    reference = weight.double() @ x.double().t()
    for _ in range(2):
        close(torch._sparse_semi_structured_mm(values, meta, x.t()), reference, dtype)
    close(torch._sparse_semi_structured_mm(values, meta, x.t(), out_dtype=torch.float32), reference, dtype)
    added = torch._sparse_semi_structured_addmm(bias, values, meta, x.t(), alpha=1.3, beta=-0.7)
    close(added, 1.3 * reference - 0.7 * bias.double()[:, None], dtype)
    for activation, function in ((None, lambda y: y), ("relu", F.relu), ("silu", F.silu)):
        y = torch._sparse_semi_structured_linear(x, values, meta, bias=bias, activation=activation)
        close(y, function(reference.t() + bias.double()), dtype)
    # The values are converted again after a change in place.
    values.mul_(2)
    close(torch._sparse_semi_structured_mm(values, meta, x.t()), 2 * reference, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ["", "largest_abs_values_greedy", "causal1122"])
def test_tile_apply_and_apply_dense_agree(installed, device, dtype, algorithm):
    a = torch.randn(256, 1024, device=device).to(dtype)
    packed, meta, packed_t, meta_t, bitmask = torch._sparse_semi_structured_tile(a, algorithm)
    again, again_t = torch._sparse_semi_structured_apply(a, bitmask)
    assert torch.equal(again, packed) and torch.equal(again_t, packed_t)
    pruned = torch.sparse.SparseSemiStructuredTensorCUTLASS(a.shape, packed, meta, packed_t, meta_t, bitmask)
    assert torch.equal(torch._sparse_semi_structured_apply_dense(a, bitmask), pruned.to_dense())
    identity = torch.eye(1024, device=device, dtype=dtype)
    assert torch.equal(pruned @ identity, pruned.to_dense())
    with pytest.raises(RuntimeError, match="Unknown algorithm"):
        torch._sparse_semi_structured_tile(a, "none")


def test_cusparselt_operators(installed):
    weight = sparse_matrix(64, 128, torch.float16, "cpu")
    x = torch.randn(128, 24).half()
    compressed = torch._cslt_compress(weight)
    assert compressed.numel() == 64 * 128 * 9 // 16
    reference = weight.double() @ x.double()
    close(torch._cslt_sparse_mm(compressed, x), reference, torch.float16)
    close(torch._cslt_sparse_mm(compressed, x, transpose_result=True), reference.t(), torch.float16)
    scaled = torch._cslt_sparse_mm(
        compressed, x, bias=torch.ones(64).half(), alpha=torch.tensor(0.5), out_dtype=torch.float32
    )
    close(scaled, 0.5 * reference + 1, torch.float16)
    assert torch._cslt_sparse_mm_search(compressed, x) == 0


def test_integers(installed):
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

    mask = torch.tensor([1, 0, 0, 1]).tile((64, 32)).bool()
    weight = torch.randint(-128, 128, (64, 128), dtype=torch.int8).masked_fill(~mask, 0)
    x = torch.randint(-128, 128, (24, 128), dtype=torch.int8)
    exact = weight.long() @ x.long().t()
    values, meta = sparse_semi_structured_from_dense_cutlass(weight)
    assert torch.equal(torch._sparse_semi_structured_mm(values, meta, x.t()), exact.int())
    y = torch._sparse_semi_structured_linear(x, values, meta, activation="relu")
    assert torch.equal(y, exact.t().clamp(min=0).int())
    compressed = torch._cslt_compress(weight)
    assert compressed.numel() == 64 * 128 * 10 // 16
    for dtype in (torch.int32, torch.bfloat16, torch.float16):
        y = torch._cslt_sparse_mm(compressed, x.t(), alpha=torch.tensor(2.0**-6), out_dtype=dtype)
        close(y, exact.double() / 64 if dtype.is_floating_point else (exact.double() / 64).trunc(), torch.bfloat16)
    assert torch.equal(torch._cslt_sparse_mm(compressed, x.t()), exact.clamp(-128, 127).to(torch.int8))
