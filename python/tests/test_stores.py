"""Stores of sparse matrices against torch's and scipy's."""

import numpy as np
import pytest
import torch
import twofour
from twofour.arrays.stores import FORMS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)


def dense(rows=24, cols=40, seed=0, share=0.3):
    random = np.random.default_rng(seed)
    values = (random.integers(-8, 9, (rows, cols)) / 4).astype(np.float32)
    return values * (random.random((rows, cols)) < share)


def block_of(form):
    return (8, 4) if form == "bsr" else None


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_back_the_matrix_and_every_other_form(form, dtype):
    matrix = torch.from_numpy(dense() + 0.0).to(dtype)
    store = twofour.Store.from_dense(matrix, form, block_of(form))
    same_bits(store.to_dense(), matrix)
    for other in FORMS:
        converted = store.to(other, block_of(other))
        made = twofour.Store.from_dense(matrix, other, block_of(other))
        assert np.array_equal(converted.starts, made.starts) and np.array_equal(converted.indices, made.indices)
        same_bits(converted.values, made.values)
        same_bits(converted.to(form, block_of(form)).to_dense(), matrix)


@pytest.mark.parametrize("form", FORMS)
def test_torch_has_the_same_parts(form):
    matrix = torch.from_numpy(dense(seed=1) + 0.0)
    store = twofour.Store.from_dense(matrix, form, block_of(form))
    of_torch = {
        "coo": lambda: matrix.to_sparse_coo(),
        "csr": lambda: matrix.to_sparse_csr(),
        "csc": lambda: matrix.to_sparse_csc(),
        "bsr": lambda: matrix.to_sparse_bsr((8, 4)),
    }[form]()
    assert torch.equal(store.to_torch().to_dense(), matrix) and store.to_torch().layout == of_torch.layout
    found = twofour.Store.from_torch(of_torch)
    assert found.form == form and found.shape == store.shape and found.block == store.block
    assert np.array_equal(found.starts, store.starts) and np.array_equal(found.indices, store.indices)
    assert torch.equal(found.values, store.values)
    array = twofour.Store.from_dense(matrix.numpy(), form, block_of(form))
    assert torch.equal(array.to_torch().to_dense(), matrix)
    half = twofour.Store.from_dense(matrix.bfloat16(), form, block_of(form))
    assert torch.equal(half.to_torch().to_dense(), matrix.bfloat16())


@pytest.mark.parametrize("form", FORMS)
def test_scipy_has_the_same_parts(form):
    sparse = pytest.importorskip("scipy.sparse")
    matrix = dense(seed=2) + 0.0
    store = twofour.Store.from_dense(matrix, form, block_of(form))
    assert np.array_equal(store.to_scipy().toarray(), matrix) and store.to_scipy().format == form
    own = sparse.coo_array(matrix)
    own = own.tobsr(blocksize=(8, 4)) if form == "bsr" else own.asformat(form)
    found = twofour.Store.from_scipy(own)
    assert np.array_equal(found.starts, store.starts) and np.array_equal(found.indices, store.indices)
    assert np.array_equal(found.values, store.values)
    twice = sparse.coo_array((np.float32([1, 2, 4]), ([0, 1, 0], [2, 0, 2])), shape=(2, 3))
    assert np.array_equal(twofour.Store.from_scipy(twice).to_dense(), [[0, 0, 5], [2, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_dense_matrix(form, dtype):
    matrix = torch.from_numpy(dense(40, 72, 3)).to(dtype)
    store = twofour.Store.from_dense(matrix, form, (16, 8) if form == "bsr" else None)
    bias = torch.linspace(-1, 1, 40)
    for shape in ((72,), (1, 72), (0, 72), (3, 7, 72), (70, 72)):
        x = torch.randn(shape).to(dtype)
        expected = torch.nn.functional.linear(x.double(), matrix.double(), bias.double())
        found = store.linear(x, bias)
        assert found.dtype == dtype
        assert torch.allclose(found.double(), expected, atol=0.1 if dtype != torch.float32 else 1e-4, rtol=0.02)
    x = np.ones((2, 72), np.float32)
    array = twofour.Store.from_dense(dense(40, 72, 3), form, (16, 8) if form == "bsr" else None)
    assert np.allclose(array.linear(x), x @ dense(40, 72, 3).T, atol=1e-4)


def test_coordinates_that_torch_has_twice_are_summed():
    twice = torch.sparse_coo_tensor([[0, 1, 0], [2, 0, 2]], [1.0, 2.0, 4.0], (2, 3))
    assert torch.equal(twofour.Store.from_torch(twice).to_dense(), torch.tensor([[0, 0, 5.0], [2, 0, 0]]))


def test_bits_of_types_that_numpy_lacks_are_held_in_integers():
    bits = torch.from_numpy(dense(seed=4)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    store = twofour.Store.from_dense(bits, dtype="bfloat16")
    assert (store.dtype, store.values.dtype) == ("bfloat16", np.uint16)
    assert np.array_equal(store.to_dense() & 0x7FFF, bits & 0x7FFF)
    assert store.to_torch().dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (("csr", (2, 3), [0, 1], [0], [1.0]), "expected 3 elements, found 2"),
        (("csr", (2, 3), [0, 1, 1], [3], [1.0]), "index 0 is 3"),
        (("csr", (2, 3), [0, 1, 1], [-1], [1.0]), "not -1"),
        (("csr", (2, 3), [0, 2, 2], [1, 1], [1.0, 2.0]), "none is twice"),
        (("csc", (2, 3), [0, 1, 1, 1], [2], [1.0]), "compressed sparse columns"),
        (("coo", (2, 3), [1, 0], [0, 0], [1.0, 2.0]), "in order of row"),
        (("csr", (2, 3), [0.5, 1, 1], [0], [1.0]), "whole numbers"),
        (("bsr", (2, 4), [0, 1], [0], np.zeros((1, 2, 2)), (2, 2)), "float64"),
        (("csr", (2, 3), [0, 0, 0], [], [], (2, 2)), "of no other"),
        (("dia", (2, 3), [0, 0, 0], [], []), "one of coo, csr, csc, bsr"),
    ],
)
def test_parts_that_fit_no_matrix_are_errors(parts, words):
    form, shape, starts, indices, values, *block = parts
    values = values if isinstance(values, np.ndarray) else np.asarray(values, np.float32)
    with pytest.raises((ValueError, TypeError), match=words):
        twofour.Store(form, shape, np.asarray(starts), np.asarray(indices), values, *block)


def test_what_cannot_be_multiplied_or_exchanged_is_an_error():
    store = twofour.Store.from_dense(dense())
    with pytest.raises(ValueError, match="must be 40"):
        store.linear(np.ones((2, 41), np.float32))
    with pytest.raises(TypeError, match="float64"):
        store.linear(np.ones((2, 40)))
    with pytest.raises(TypeError, match="not multiplied"):
        twofour.Store.from_dense(dense().astype(np.int8)).linear(np.ones((2, 40), np.int8))
    cut = twofour.Store.from_dense(dense(5, 7), "bsr", (2, 2))
    assert np.array_equal(cut.to_dense(), dense(5, 7) + 0.0)
    with pytest.raises(ValueError, match="fill the matrix"):
        cut.to_torch()
    with pytest.raises(TypeError, match="strided"):
        twofour.Store.from_torch(torch.ones(2, 2))
    with pytest.raises(TypeError, match="scipy"):
        twofour.Store.from_scipy(np.ones((2, 2)))
