"""torch's own tests of 2:4 tensors, run on twofour where ``TWOFOUR_TORCH_TESTS`` names their file (:mod:`torch_suite`);
and, always, what twofour computes in the cases in which torch refuses."""

import os
import re

import pytest
import torch
import torch_suite
from conftest import close, devices

import twofour
from twofour.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

FILE = os.environ.get("TWOFOUR_TORCH_TESTS")
CASES = [case for device in devices() for case in torch_suite.load(FILE, device)] if FILE else []

needs_the_file = pytest.mark.skipif(
    not FILE, reason="set TWOFOUR_TORCH_TESTS to PyTorch's test/test_sparse_semi_structured.py to run its cases"
)


@needs_the_file
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case):
    outcome, why = case.run()
    exemption = case.exemption()
    expected = "passes" if exemption is None else exemption.outcome
    assert outcome == expected, f"{case.name} {outcome}, but {expected} was expected\n{why}"


@needs_the_file
def test_every_exemption_is_of_a_case():
    for device in devices():
        names = [case.name for case in CASES if case.device == device]
        # As many as the two backends had when the loader was written, or more.
        assert len(names) >= 239
        for exemption in torch_suite.EXEMPTIONS:
            if exemption.device in (None, device):
                assert any(re.search(exemption.pattern, name) for name in names), exemption


def test_what_is_computed_instead_is_tested():
    for exemption in torch_suite.EXEMPTIONS:
        assert exemption.instead is None or callable(globals()[exemption.instead])


def test_a_file_of_another_kind_is_refused(tmp_path):
    other = tmp_path / "test_other.py"
    other.write_text("import torch\n")
    with pytest.raises(ValueError, match="not a version of test_sparse_semi_structured.py"):
        torch_suite.load(str(other), "cpu")


def pruned(rows, cols, dtype, device):
    """A matrix that is 2:4 along its rows, without zeros among what is kept."""
    mask = torch.tensor([0, 1, 1, 0], device=device).tile((rows, -(-cols // 4)))[:, :cols].bool()
    dense = torch.randint(1, 9, (rows, cols), device=device) * (2 * torch.randint(2, (rows, cols), device=device) - 1)
    return dense.to(dtype).masked_fill(~mask, 0)


BACKENDS = pytest.mark.parametrize("force_cutlass", [False, True], indirect=True, ids=["cusparselt", "cutlass"])
FLOATS = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


@pytest.fixture
def force_cutlass(request):
    before = SparseSemiStructuredTensor._FORCE_CUTLASS
    SparseSemiStructuredTensor._FORCE_CUTLASS = request.param
    yield
    SparseSemiStructuredTensor._FORCE_CUTLASS = before


@BACKENDS
@FLOATS
@pytest.mark.parametrize("tokens", [1, 64, 96])
def test_floats_along_either_dimension(force_cutlass, dtype, tokens, device):
    a = pruned(128, 256, dtype, device)
    sparse = to_sparse_semi_structured(a)
    b = torch.randn(128, tokens, device=device).to(dtype)
    close(torch.mm(sparse.t(), b), a.double().t() @ b.double(), dtype)
    close(torch.mm(b.t(), sparse), b.double().t() @ a.double(), dtype)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(sparse.t(), b.t())


@BACKENDS
@pytest.mark.parametrize("tokens", [1, 64, 128])
def test_integers_in_either_order_of_memory(force_cutlass, tokens, device):
    a = pruned(256, 128, torch.int8, device)
    sparse = to_sparse_semi_structured(a)
    b = torch.randint(-4, 5, (128, tokens), dtype=torch.int8, device=device)
    exact = (a.cpu().int() @ b.cpu().int()).to(torch.int8)
    for operand in (b, b.t().contiguous().t()):
        assert torch.equal(torch.mm(sparse, operand).cpu(), exact)
    for product in (lambda: torch.mm(sparse.t(), b), lambda: torch.mm(b.t(), sparse)):
        with pytest.raises(
            NotImplementedError, match="`SparseSemiStructuredTensor.*` matmul: operation is not supported"
        ):
            product()


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(2, 2), (1, 5), (33, 70)])
def test_small_and_odd_shapes(force_cutlass, dtype, shape, device):
    a = pruned(*shape, dtype, device)
    sparse = to_sparse_semi_structured(a)
    assert torch.equal(sparse.to_dense(), a)
    b = torch.randint(-3, 4, (shape[1], 3), device=device).to(dtype)
    exact = a.cpu().double() @ b.cpu().double()
    assert torch.equal(
        torch.mm(sparse, b).cpu(), exact.to(torch.int32).to(torch.int8) if dtype is torch.int8 else exact.to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_to_keeps_it_sparse(dtype, device):
    a = pruned(128, 128, dtype, device)
    sparse = to_sparse_semi_structured(a)
    for moved, expected in (
        (sparse.to("cpu"), a.cpu()),
        (sparse.to(device, copy=True), a),
        (sparse.to(torch.float32), a.float()),
        (sparse.to("cpu", torch.float32, copy=True), a.cpu().float()),
        (sparse.to(dtype, copy=True), a),
        (sparse.to(device="cpu", dtype=torch.float32), a.cpu().float()),
    ):
        assert isinstance(moved, SparseSemiStructuredTensor)
        assert moved.device == expected.device and moved.dtype == expected.dtype
        assert torch.equal(moved.to_dense(), expected)


def test_what_is_not_sparse_is_refused_and_vectors_and_batches_are_multiplied(device):
    with pytest.raises(ValueError, match="row 0, group 0: 4 non-zeros where 2:4 allows 2"):
        to_sparse_semi_structured(torch.ones(64, 128, dtype=torch.float16, device=device))
    a = pruned(64, 128, torch.float16, device)
    sparse = to_sparse_semi_structured(a)
    for b in (torch.randn(128, device=device).half(), torch.randn(5, 128, 6, device=device).half()):
        close(sparse @ b, a.double() @ b.double(), torch.float16)


def test_what_cusparselt_compressed_becomes_a_tensor(device):
    a = pruned(128, 128, torch.float16, device)
    a = a.masked_fill(~torch.tensor([[0, 1, 1, 0]] * 2 + [[1, 0, 0, 1]] * 2, device=device).tile((32, 32)).bool(), 0)
    with twofour.install():
        along_rows, along_columns = torch._cslt_compress(a), torch._cslt_compress(a.t().contiguous())
        sparse = torch.sparse.SparseSemiStructuredTensorCUSPARSELT(a.shape, along_rows, None, along_columns, None, None)
        x = torch.randn(128, 24, device=device).half()
        close(sparse @ x, a.double() @ x.double())
        close(sparse.t() @ x, a.double().t() @ x.double())
        assert torch.equal(sparse.to_dense(), a)


def test_operators_of_torch_round_once():
    a, x = pruned(64, 128, torch.float16, "cpu"), torch.randn(40, 128).half()
    bias = -(x.double() @ a.double().t()).mean(0).half()
    with twofour.install():
        sparse = torch.sparse.SparseSemiStructuredTensorCUTLASS.from_dense(a)
        values, meta = sparse.values(), sparse.indices()
        exact = x.double() @ a.double().t()
        y = torch._sparse_semi_structured_linear(x, values, meta, bias=bias)
        torch.testing.assert_close(y.double(), exact + bias.double(), rtol=2**-11, atol=1e-4)
        y = torch._sparse_semi_structured_addmm(bias, values, meta, x.t(), alpha=1.3, beta=1.3)
        torch.testing.assert_close(y.double(), 1.3 * (exact + bias.double()).t(), rtol=2**-11, atol=1e-4)
        y = torch._cslt_sparse_mm(
            torch._cslt_compress(a), x.t(), bias=bias[:1], alpha=torch.tensor(1e-3), out_dtype=torch.float32
        )
        torch.testing.assert_close(y.double(), 1e-3 * exact.t() + bias[0].double(), rtol=1e-6, atol=1e-6)
        # The same values with other metadata are another weight.
        other = torch.sparse.SparseSemiStructuredTensorCUTLASS.from_dense(a.roll(1, 1))
        y = torch._sparse_semi_structured_linear(x, values, other.indices())
        assert not torch.equal(y, torch._sparse_semi_structured_linear(x, values, meta))


def test_a_graph_prunes_transposes_and_multiplies():
    cls = twofour.sparse.SparseSemiStructuredTensorCUSPARSELT
    weight = to_sparse_semi_structured(torch.randn(64, 128), prune="greedy")

    def function(x, z):
        return x @ cls.prune_dense_static_sort(x).t(), z @ weight.t(), weight @ z.t()

    x, z = torch.randn(128, 64, requires_grad=True), torch.randn(8, 128)
    expected = function(x, z)
    (expected_gradient,) = torch.autograd.grad(expected[0].sum(), x)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(x, z)
    (gradient,) = torch.autograd.grad(found[0].sum(), x)
    for a, b in zip((*found, gradient), (*expected, expected_gradient), strict=True):
        torch.testing.assert_close(a, b)
