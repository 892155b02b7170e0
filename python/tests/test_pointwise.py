"""Element-wise operators on sparse tensors."""

import pytest
import torch
import torch.nn.functional as F
from conftest import close

from twofour.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS
from twofour.sparsity.training import semi_structured_sparsify, semi_structured_sparsify_like

FUNCTIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "times a number": lambda x: x * 3,
    "squared": lambda x: x * x,
    "doubled": lambda x: x + x,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients_are_those_under_the_mask(device, name, dtype):
    function = FUNCTIONS[name]
    x = torch.randn(24, 36, device=device).to(dtype).requires_grad_()
    sparse = semi_structured_sparsify(x, "optimal")
    y = function(sparse)
    assert isinstance(y, SparseSemiStructuredTensorCUTLASS) and y.tiles is sparse.tiles
    reference = (x.detach() * sparse.mask).double().requires_grad_()
    expected = function(reference)
    close(y.detach().to_dense(), expected.detach())
    dy, other = torch.randn(5, 24, device=device).to(dtype), torch.randn(5, 36, device=device).to(dtype)
    F.linear(other, y).backward(dy)
    F.linear(other.double(), expected).backward(dy.double())
    found = x.grad.to_dense() if isinstance(x.grad, SparseSemiStructuredTensor) else x.grad
    # The gradient of a product of sparse tensors is masked; that of a sum passes as it is.
    close(found * sparse.mask, reference.grad * sparse.mask)


def test_both_packings_have_the_result(device):
    y = F.silu(semi_structured_sparsify(torch.randn(16, 24, device=device)))
    kept = y.to_dense().double()
    left, right = torch.randn(3, 16, device=device), torch.randn(24, 3, device=device)
    close(left @ y, left.double() @ kept)
    close(y @ right, kept @ right.double())


def test_two_operands(device):
    x, dense = torch.randn(16, 24, device=device), torch.randn(16, 24, device=device)
    a = semi_structured_sparsify(x, "optimal")
    b = semi_structured_sparsify_like(dense, a)
    close((a + b).to_dense(), (x + dense).double() * a.mask)
    close(torch.add(a, b, alpha=2).to_dense(), (x.double() + 2 * dense.double()) * a.mask)
    close((a * b).to_dense(), (x * dense).double() * a.mask)
    for product in (a * dense, dense * a, a * dense[0], a * torch.tensor(2.0, device=device) * dense * 0.5):
        assert isinstance(product, SparseSemiStructuredTensor)
    close((dense * a).to_dense(), (x * dense).double() * a.mask)
    total = a + dense
    assert type(total) is torch.Tensor
    close(total, x.double() * a.mask + dense)
    other = semi_structured_sparsify(-x, "")
    for function in (torch.add, torch.mul):
        with pytest.raises(ValueError, match="same sparsity pattern"):
            function(a, other)
    with pytest.raises(ValueError, match="operand 1 is dense"):
        torch.ops.aten.gelu_backward(a, dense)
    with pytest.raises(ValueError, match="broadcast"):
        a * torch.randn(2, 16, 24, device=device)


def test_sparse_gradients_accumulate(device):
    x = torch.randn(16, 24, device=device, requires_grad=True)
    pattern = semi_structured_sparsify(x.detach(), "optimal")
    other, dy = torch.randn(5, 24, device=device), torch.randn(5, 16, device=device)
    for _ in range(2):
        F.linear(other, semi_structured_sparsify_like(x, pattern)).backward(dy)
    once = (dy.double().t() @ other.double()) * pattern.mask
    assert isinstance(x.grad, SparseSemiStructuredTensor)
    close(x.grad.to_dense(), 2 * once)
    with pytest.raises(ValueError, match="in place"):
        x.grad.add_(torch.ones_like(x))
    x.grad = torch.ones(16, 24, device=device)
    F.linear(other, semi_structured_sparsify_like(x, pattern)).backward(dy)
    assert type(x.grad) is torch.Tensor
    close(x.grad, 1 + once)


def test_a_table_that_was_loaded_before_has_the_operators_too():
    from twofour.tensor import pointwise

    class Mine(SparseSemiStructuredTensor):
        pass

    from twofour.tensor import semi_structured

    Mine.SPARSE_DISPATCH = {
        packet: handler for packet, handler in semi_structured.DISPATCH.items() if packet not in pointwise.HANDLERS
    }
    own = Mine.SPARSE_DISPATCH[torch.ops.aten.silu] = lambda func, types, args, kwargs: "mine"
    pointwise.install()
    assert Mine.SPARSE_DISPATCH[torch.ops.aten.silu] is own
    assert isinstance(F.relu(Mine.prune_dense_static_sort(torch.randn(8, 8))), Mine)
