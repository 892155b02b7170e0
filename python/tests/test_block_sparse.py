"""Block-sparse weights."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import close

from twofour.sparsity import (
    BlockSparseTensor,
    BlockSparseWeightConfig,
    block_sparse_weight,
    semi_sparse_weight,
    sparsify_,
)


def blocky(rows, cols, blocksize, device="cpu", dtype=torch.float32, kept=0.3):
    """A matrix of which some blocks are zero; the first row of blocks and the last column are."""
    blocks = torch.rand(-(-rows // blocksize), -(-cols // blocksize)) < kept
    blocks[0], blocks[:, -1] = False, False
    mask = blocks.repeat_interleave(blocksize, 0).repeat_interleave(blocksize, 1)[:rows, :cols]
    return (torch.randn(rows, cols) * mask).to(device, dtype)


@pytest.mark.parametrize("shape", [(64, 64, 16), (128, 256, 64), (70, 50, 16), (5, 130, 64), (48, 48, 1)])
def test_the_format_is_that_of_torch(shape):
    rows, cols, size = shape
    dense = blocky(*shape)
    sparse = BlockSparseTensor.from_dense(dense, size)
    assert torch.equal(sparse.to_dense(), dense)
    if rows % size == 0 and cols % size == 0:
        peer = dense.to_sparse_bsr(size)
        assert torch.equal(sparse.crow_indices(), peer.crow_indices())
        assert torch.equal(sparse.col_indices(), peer.col_indices())
        assert torch.equal(sparse.values(), peer.values())
        assert sparse._nnz() == peer._nnz()


@pytest.mark.parametrize("shape", [(128, 256, 64), (70, 50, 16), (5, 130, 64), (64, 64, 32)])
def test_products_and_gradients_are_dense_ones(device, shape):
    for dtype in (torch.bfloat16, torch.float16) + ((torch.float32, torch.float64) if device == "cpu" else ()):
        dense = blocky(*shape, device, dtype)
        bias = torch.randn(shape[0], device=device, dtype=dtype)
        weight = BlockSparseTensor.from_dense(dense, shape[2])
        for size in [(), (1,), (7,), (3, 40)]:
            x = torch.randn(*size, shape[1], device=device, dtype=dtype, requires_grad=True)
            y = F.linear(x, weight, bias)
            assert y.dtype == dtype and tuple(y.shape) == (*size, shape[0])
            close(y, F.linear(x.double(), dense.double(), bias.double()))
            dy = torch.randn_like(y)
            y.backward(dy)
            close(x.grad, dy.double() @ dense.double())
        with torch.no_grad():
            assert F.linear(x.new_empty(0, shape[1]), weight).shape == (0, shape[0])
            empty = BlockSparseTensor.from_dense(torch.zeros_like(dense), shape[2])
            assert not F.linear(x, empty).any() and empty._nnz() == 0


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0, 0)])
def test_sizes_of_0(shape):
    weight = BlockSparseTensor.from_dense(torch.ones(shape), 16)
    x = torch.ones(3, shape[1], requires_grad=True)
    y = F.linear(x, weight)
    y.sum().backward()
    assert y.shape == (3, shape[0]) and not y.any() and x.grad.shape == x.shape and not x.grad.any()


def test_indices_of_32_bits_are_taken():
    dense = blocky(64, 96, 16)
    weight = BlockSparseTensor.from_dense(dense, 16)
    narrow = weight.crow_indices().int(), weight.col_indices().int()
    weight = BlockSparseTensor(weight.shape, 16, *narrow, weight.values())
    x = torch.randn(3, 96)
    close(F.linear(x, weight), x.double() @ dense.double().t())


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_products_of_our_kernel_on_a_gpu_are_dense_ones(size):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for rows, cols in ((512, 1024), (200, 136), (64, 8)):
        for dtype in (torch.bfloat16, torch.float16):
            dense = blocky(rows, cols, size, "cuda", dtype)
            weight = BlockSparseTensor.from_dense(dense, size)
            for tokens in (1, 16, 31, 65, 300, 4000):
                # Memory that is not aligned to 16 bytes, and not contiguous.
                x = torch.randn(tokens + 1, cols, device="cuda", dtype=dtype)
                unaligned = x.flatten()[1 : 1 + tokens * cols].view(tokens, cols)
                for input in (x[1:], unaligned, x.t().contiguous().t()[1:]):
                    close(F.linear(input, weight), input.double() @ dense.double().t())
            x = torch.randn(3, 5, cols, device="cuda", dtype=dtype, requires_grad=True)
            y = F.linear(x, weight)
            y.backward(torch.ones_like(y))
            close(x.grad, torch.ones_like(y).double() @ dense.double())
    # What the kernel does not multiply becomes dense.
    others = ((70, 50, size), torch.bfloat16), ((64, 96, 24), torch.float16), ((64, 64, 16), torch.float32)
    for shape, dtype in others:
        dense = blocky(*shape, "cuda", dtype)
        x = torch.randn(7, shape[1], device="cuda", dtype=dtype)
        close(F.linear(x, BlockSparseTensor.from_dense(dense, shape[2])), x.double() @ dense.double().t())


def test_parts_that_are_no_matrix_are_refused():
    values, x = torch.ones(2, 32, 32), torch.ones(3, 64)
    rows = [([0, 1, 2], [0, 2]), ([0, 1, 2], [0, -1]), ([0, 2, 1], [0, 1]), ([0, 2, 2], [1, 0]), ([0, 1, 3], [0, 1])]
    for crow, col in rows:
        weight = BlockSparseTensor((64, 64), 32, torch.tensor(crow), torch.tensor(col), values)
        with pytest.raises((RuntimeError, ValueError), match="block|col_indices"):
            F.linear(x, weight)


def model_of(device, dtype):
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)).to(device, dtype)
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(blocky(*layer.weight.shape, 64, device, dtype))
    return model


@pytest.mark.parametrize("tokens", [1, 200])
def test_sparsify_replaces_weights(device, tokens):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = model_of(device, dtype)
    x = torch.randn(tokens, 256, device=device, dtype=dtype)
    expected = model(x).detach()
    assert sparsify_(model, block_sparse_weight(blocksize=64)) is model
    assert all(isinstance(layer.weight, BlockSparseTensor) and not layer.weight.requires_grad for layer in model)
    with torch.inference_mode():
        close(model(x), expected)
    if tokens > 1:
        close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)


def test_copies_and_files_hold_the_same_matrix(device):
    model = sparsify_(model_of(device, torch.bfloat16), BlockSparseWeightConfig())
    x = torch.randn(3, 256, device=device, dtype=torch.bfloat16)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert isinstance(state["0.weight"], BlockSparseTensor)
    again = copy.deepcopy(model)
    again.load_state_dict(state, assign=True)
    for same in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(same(x), expected)
    half = copy.deepcopy(model).half()
    assert half[0].weight.dtype == torch.float16
    close(half(x.half()), expected, torch.bfloat16)


def test_bad_input_is_an_exception():
    weight = BlockSparseTensor.from_dense(blocky(64, 64, 16), 16)
    with pytest.raises(RuntimeError, match="must be 64"):
        F.linear(torch.randn(2, 63), weight)
    with pytest.raises(RuntimeError, match="must be 64"):
        F.linear(torch.tensor(1.0), weight)
    with pytest.raises(NotImplementedError, match="float16"):
        F.linear(torch.randn(2, 64).half(), weight)
    with pytest.raises(NotImplementedError, match="to_dense"):
        weight + 1
    with pytest.raises(ValueError, match="blocksize is 0"):
        sparsify_(torch.nn.Sequential(torch.nn.Linear(4, 4)), block_sparse_weight(0))
    with pytest.raises(RuntimeError, match="3-D"):
        BlockSparseTensor.from_dense(torch.ones(2, 2, 2))
    with pytest.raises(ValueError, match="prune is for 2:4"):
        sparsify_(torch.nn.Sequential(torch.nn.Linear(4, 4)), block_sparse_weight(), prune=True)
    with pytest.raises(ValueError, match="no gradient"):
        BlockSparseTensor(
            (64, 64), 16, *(getattr(weight, part) for part in weight.__tensor_flatten__()[0]), requires_grad=True
        )
    with pytest.raises(ValueError, match="needs crow_indices"):
        BlockSparseTensor((32, 64), 16, weight.crow_indices(), weight.col_indices(), weight.values())
    with pytest.raises(TypeError, match="BlockSparseWeightConfig"):
        sparsify_(torch.nn.Sequential(torch.nn.Linear(4, 4)), object())
    with pytest.raises(ValueError, match="2:4"):
        sparsify_(torch.nn.Sequential(torch.nn.Linear(8, 8)), semi_sparse_weight())
