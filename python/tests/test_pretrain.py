"""What the pre-training recipes are made of: estimators, transposable masks, masked decay, the gated GELU."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import close

import twofour.pretrain as pretrain
from twofour.pretrain import GELUglu, MVUE24_approx, TransposableSparse, masked_add_, soft_threshold24, sparse24
from twofour.sparse import to_sparse_semi_structured

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def groups(dense):
    """The tensor in groups of four along its last dimension, completed with zeros."""
    return F.pad(dense, (0, -dense.shape[-1] % 4)).unflatten(-1, (-1, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 32), (3, 5, 10), (7,)])
def test_thresholds(device, shape, dtype):
    dense = torch.randn(shape, device=device).to(dtype).requires_grad_()
    four = groups(dense.detach())
    order = four.abs().float().argsort(dim=-1, descending=True, stable=True)
    expected_mask = torch.zeros_like(four, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    third = four.abs().float().gather(-1, order[..., 2:3])
    soft = torch.where(expected_mask, (four.abs().float() - third) * four.float().sign(), 0).to(dtype)
    for function, expected in ((sparse24, four * expected_mask), (soft_threshold24, soft)):
        found, mask = function(dense)
        assert found.shape == dense.shape and mask.dtype == torch.bool
        assert torch.equal(groups(found.detach()), expected)
        assert torch.equal(mask, expected_mask.flatten(-2)[..., : shape[-1]])
        gradient = torch.randn(shape, device=device).to(dtype)
        dense.grad = None
        found.backward(gradient)
        assert torch.equal(dense.grad, gradient)


def test_ties_and_continuity():
    assert sparse24(torch.ones(1, 4))[1].tolist() == [[True, True, False, False]]
    assert soft_threshold24(torch.tensor([[1.0, -5.0, 2.0, 3.0]]))[0].tolist() == [[0, -3, 0, 1]]
    assert soft_threshold24(torch.tensor([[2.0, -2.0, 4.0, 1.0]]))[0].tolist() == [[0, 0, 2, 0]]


def test_the_estimate_is_unbiased_and_two_of_four(device):
    x = torch.tensor(
        [[3.0, -1.0, 0.5, 2.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 7.0, 0.0], [1e-3, 10.0, 1e-3, 0.0]], device=device
    )
    draws = torch.stack([MVUE24_approx(x.repeat(2500, 1), seed) for seed in range(8)]).view(-1, *x.shape).double()
    assert ((draws != 0).sum(-1) <= 2).all()
    deviation = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - x).abs() <= 5 * deviation + 1e-6).all()
    assert torch.equal(MVUE24_approx(x, 3), MVUE24_approx(x, 3))
    torch.manual_seed(1)
    first = MVUE24_approx(x.repeat(50, 1))
    assert not torch.equal(MVUE24_approx(x.repeat(50, 1)), first)
    torch.manual_seed(1)
    assert torch.equal(MVUE24_approx(x.repeat(50, 1)), first)
    # Groups of different columns and rows draw different numbers, also of a column-major tensor.
    ones = torch.ones(64, 64, device=device).t()
    draws = groups(MVUE24_approx(ones, 0)).reshape(-1, 4)
    assert len({tuple(row) for row in (draws != 0).tolist()}) == 6


def test_the_toolkits_names():
    for name in ("sparse24", "soft_threshold24", "MVUE24_approx"):
        assert getattr(pretrain, f"{name}_torch") is getattr(pretrain, f"{name}_triton") is getattr(pretrain, name)
    assert all(hasattr(pretrain, name) for name in pretrain.__all__)


def patterns():
    rows = [torch.tensor([i in pair for i in range(4)]) for pair in itertools.combinations(range(4), 2)]
    found = [torch.stack(choice) for choice in itertools.product(rows, repeat=4)]
    return torch.stack([p for p in found if (p.sum(0) == 2).all()])


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("shape", [(16, 24), (6, 9)])
def test_transposable_masks_are_the_best_of_the_ninety(device, shape, absolute):
    dense = torch.randn(shape, device=device, requires_grad=True)
    sparse, mask = TransposableSparse(abs=absolute)(dense)
    assert torch.equal(sparse.detach(), dense.detach() * mask) and mask.shape == shape
    candidates = patterns().to(device)
    assert len(candidates) == 90
    values = dense.detach().abs() if absolute else dense.detach()
    padded = F.pad(values, (0, -shape[1] % 4, 0, -shape[0] % 4)).double()
    kept = F.pad(mask, (0, -shape[1] % 4, 0, -shape[0] % 4))
    for row, col in itertools.product(range(0, padded.shape[0], 4), range(0, padded.shape[1], 4)):
        tile, chosen = padded[row : row + 4, col : col + 4], kept[row : row + 4, col : col + 4]
        assert (chosen.sum(0) <= 2).all() and (chosen.sum(1) <= 2).all()
        best = (candidates * tile).sum((1, 2)).max()
        assert (tile * chosen).sum() >= best - 1e-6
    gradient = torch.randn(shape, device=device)
    sparse.backward(gradient)
    assert torch.equal(dense.grad, gradient)


def test_transposable_masks_refuse_what_is_no_matrix_of_floats():
    with pytest.raises(RuntimeError, match="3 dimensions"):
        TransposableSparse()(torch.ones(2, 4, 4))
    with pytest.raises(NotImplementedError, match="int64"):
        TransposableSparse()(torch.ones(4, 4, dtype=torch.int64))
    for absolute in (True, False):
        with pytest.raises(ValueError, match="NaN"):
            TransposableSparse(absolute)(torch.full((4, 4), torch.nan))


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.uint8])
def test_masked_add(device, mask_dtype):
    grad, p = torch.randn(6, 8, device=device), torch.randn(8, 6, device=device).t()
    mask = (torch.rand(6, 8, device=device) < 0.5).to(mask_dtype)
    before = grad.clone()
    assert masked_add_(grad, p, mask, alpha=0.25) is grad
    close(grad, before.double() + 0.25 * p.double() * (mask == 0))
    assert torch.equal(masked_add_(before.clone(), p, mask), before)
    with pytest.raises(ValueError, match=r"\(6, 8\), \(8, 6\)"):
        masked_add_(grad, p.t(), mask)


def test_masked_decay_is_that_of_the_rust_crate(device):
    """The numbers of the example of `twofour::estimate::masked_decay`."""
    gradient, weight = torch.full((1, 4), 10.0, device=device), torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device)
    kept = torch.tensor([[False, False, True, True]], device=device)
    assert masked_add_(gradient, weight, kept, alpha=0.5).tolist() == [[10.5, 11.0, 10.0, 10.0]]


@pytest.mark.parametrize(
    "options", [{}, {"mask": True}, {"MVUE24": True}, {"dtype": torch.int8}, {"dtype": torch.bfloat16}]
)
def test_the_toolkits_compression_prunes(device, options):
    dense = (torch.randn(24, 40, device=device) * 20).half()
    if "mask" in options:
        options = {"mask": sparse24(dense.float())[1].int()}
    torch.manual_seed(0)
    found = pretrain.to_sparse_semi_structured(dense, **options)
    torch.manual_seed(0)
    prune = not options.keys() & {"mask", "MVUE24"}
    expected = to_sparse_semi_structured(dense, prune=prune, **options)
    assert found.dtype == options.get("dtype", torch.float16) and torch.equal(found.to_dense(), expected.to_dense())
    if "MVUE24" not in options:
        chosen_from = dense.to(torch.bfloat16) if found.dtype is torch.bfloat16 else dense
        assert torch.equal(found.to_dense(), sparse24(chosen_from)[0].to(found.dtype))
    with pytest.raises(ValueError, match="exclude each other"):
        pretrain.to_sparse_semi_structured(dense, mask=dense != 0, MVUE24=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column_major", [False, True])
def test_gated_gelu(device, column_major, dtype):
    x = torch.randn(10, 12, device=device).to(dtype)
    x = (x.t().contiguous().t() if column_major else x).requires_grad_()
    dy = torch.randn(10, 6, device=device).to(dtype)
    y = GELUglu()(x)
    y.backward(dy)
    reference = x.detach().double().requires_grad_()
    expected = reference[..., :6] * F.gelu(reference[..., 6:], approximate="tanh")
    expected.backward(dy.double())
    close(y.detach(), expected.detach())
    close(x.grad, reference.grad)
    assert y.stride() == ((1, 10) if column_major else (6, 1))
    assert GELUglu()(torch.randn(2, 3, 8)).shape == (2, 3, 4)
    for shape in ((3, 5), ()):
        with pytest.raises(ValueError, match="even last dimension"):
            GELUglu()(torch.randn(shape))
    assert torch.autograd.gradcheck(GELUglu(), torch.randn(2, 8, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 2), (2, 5, 40), (7, 20002)])
def test_gated_gelu_is_torchs_for_all_shapes_and_extremes(device, shape):
    x = (30 * torch.randn(shape, device=device)).requires_grad_()
    half = shape[-1] // 2
    # Expanded: the gradient has strides of 0.
    y = GELUglu()(x)
    y.sum().backward()
    reference = x.detach().double().requires_grad_()
    expected = reference[..., :half] * F.gelu(reference[..., half:], approximate="tanh")
    expected.sum().backward()
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(x.grad.double(), reference.grad, rtol=1e-5, atol=1e-4)


def test_compiled_gated_gelu_is_the_eager_one():
    x = torch.randn(4, 12)
    compiled = torch.compile(GELUglu(), fullgraph=True, backend="aot_eager")
    for leaf in (x.clone().requires_grad_(), x):
        assert torch.allclose(compiled(leaf), GELUglu()(x), atol=1e-6)
