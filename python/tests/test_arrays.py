"""verify, prune, compress and decompress over numpy arrays and torch tensors."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import twofour

METHODS = ["magnitude", "greedy", "greedy-signed", "causal1122", "optimal"]
TORCH_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


def random(rows, cols, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def two_largest(dense):
    """The plain way to prune by magnitude: ties go to the lower index."""
    rows, cols = dense.shape
    padded = np.pad(dense, ((0, 0), (0, -cols % 4))).reshape(rows, -(-cols // 4), 4)
    kept = np.zeros(padded.shape, bool)
    order = np.argsort(-np.abs(padded), axis=-1, kind="stable")[..., :2]
    np.put_along_axis(kept, order, True, axis=-1)
    return np.where(kept, padded, 0).reshape(rows, padded.shape[1] * 4)[:, :cols]


def test_torch_is_not_imported():
    program = """
import sys
import numpy as np, twofour
dense = np.random.default_rng(0).standard_normal((8, 20)).astype(np.float32)
pruned = twofour.prune(dense)
assert twofour.verify(pruned) and not twofour.verify(dense)
assert (twofour.decompress(twofour.compress(pruned)) == pruned).all()
import os, tempfile
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "w.safetensors")
    twofour.save_file({"a.weight": twofour.compress(pruned), "b": np.arange(3)}, path)
    tensors = twofour.load_file(path, framework="numpy")
assert isinstance(tensors["a.weight"], twofour.Compressed) and (tensors["a.weight"].to_dense() == pruned).all()
assert (tensors["b"] == np.arange(3)).all()
assert "torch" not in sys.modules, "torch was imported"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["vllm", "transformers,vllm", "torch,transformers,vllm"])
def test_a_star_imports_what_the_installed_packages_suffice_for(missing):
    missing = missing.split(",")
    program = f"""
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in {missing} else found(name)
for name in {missing}:
    sys.modules[name] = None
from twofour import *
assert prune and verify and Store and load_file
assert ("Linear" in globals()) == {"torch" not in missing}
assert ("transformers" in globals()) == {"transformers" not in missing}
import twofour
assert {{"Linear", "vllm", "prune"}} <= set(dir(twofour))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stand_in_for_another_package_may_have_no_spec():
    program = "import sys, types; sys.modules['vllm'] = types.ModuleType('vllm'); import twofour"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_verify_counts_groups_and_lists_the_first():
    dense = np.zeros((6, 10), np.float32)
    dense[1, 4:7] = 1
    dense[5, 0:4] = -0.0
    dense[5, 8:10] = 3
    found = twofour.verify(dense)
    assert (found.obeys, found.groups, found.violating_groups, bool(found)) == (False, 18, 1, False)
    assert found.first_violations == (twofour.Violation(line=1, group=1, nonzeros=3),)
    assert found.zeros == 55 / 60
    assert twofour.verify(dense, axis=0).obeys
    assert twofour.verify(dense, "3:4").obeys
    full = twofour.verify(np.ones((8, 16), np.float32), places=5)
    assert (full.violating_groups, len(full.first_violations)) == (32, 5)
    with pytest.raises(AttributeError):
        full.groups = 1


def mean_of_blocks(dense, height, width):
    """The mean magnitude of every block, and the block of every element."""
    rows, cols = np.indices(dense.shape)
    block = rows // height * -(-dense.shape[1] // width) + cols // width
    sums = np.bincount(block.ravel(), np.abs(dense.astype(np.float64)).ravel())
    return sums / np.bincount(block.ravel()), block


@pytest.mark.parametrize(
    ("pattern", "height", "width", "pruned"),
    [("block:4x8@0.6", 4, 8, 0.6), ("rows@0.3", 1, 50, 0.3), ("columns@0.25", 22, 1, 0.25), ("unstructured@0.5", 1, 1, 0.5)],
)
def test_shares_of_any_part_are_those_of_lowest_mean_magnitude(pattern, height, width, pruned):
    dense = np.round(random(22, 50, 5) * 4) / 4
    means, block = mean_of_blocks(dense, height, width)
    order = np.lexsort((-np.arange(means.size), means))  # lowest mean first, the later one of equals first
    gone = np.isin(block, order[: int(means.size * pruned)])
    found = twofour.prune(dense, pattern=pattern)
    assert np.array_equal(found, np.where(gone, 0, dense))
    assert np.array_equal(twofour.prune(dense.T, pattern=pattern, axis=0), found.T)
    assert twofour.verify(found, pattern) and twofour.verify(found.T, pattern, axis=0)
    assert not twofour.verify(np.ones_like(dense), pattern)


def test_vectors_keep_four_columns_and_two_of_those_in_a_row():
    dense = np.abs(random(8, 32, 6)) + 0.1
    found = twofour.prune(dense, pattern="4:2:16")
    kept = (found != 0).reshape(2, 4, 2, 16)
    assert (kept.any(1).sum(-1) == 4).all() and (kept.sum(-1) == 2).all()
    assert twofour.verify(found, "4:2:16").obeys
    found[0, np.flatnonzero(found[:4].any(0) == 0)[0]] = 1
    (violation,) = twofour.verify(found, "4:2:16").first_violations
    assert (violation.row, violation.nonzeros, violation.allowed, violation.line) == (0, 5, 4, None)


def test_patterns_that_do_not_exist_and_rules_of_other_patterns_are_errors():
    dense = np.ones((4, 8), np.float32)
    for pattern in ("block:4@0.5", "rows", "rows@2", "0:2:4", "4:8:4:2", "diagonal@0.5"):
        with pytest.raises(ValueError, match="rows@0.25|share from 0 to 1"):
            twofour.prune(dense, pattern=pattern)
        with pytest.raises(ValueError, match="rows@0.25|share from 0 to 1"):
            twofour.verify(dense, pattern)
    with pytest.raises(ValueError, match="greedy.*rows@0.5"):
        twofour.prune(dense, "greedy", pattern="rows@0.5")
    (violation,) = twofour.verify(dense, "rows@0.25").first_violations
    assert (violation.line, violation.group, violation.nonzeros, violation.allowed) == (0, None, 8, 0)


def test_layer_inputs_prune_to_any_pattern_that_their_method_has():
    weight, x = random(16, 32, 7), random(64, 32, 8)
    inputs = twofour.LayerInputs(32)
    inputs.add(x)
    for method in ("wanda", "ria", "magnitude"):
        for pattern in ("block:4x8@0.5", "rows@0.25", "4:2:8", "unstructured@0.5"):
            assert twofour.verify(inputs.prune(weight, method, pattern=pattern), pattern)
    with pytest.raises(ValueError, match="alps.*N:M"):
        inputs.prune(weight, "alps", pattern="rows@0.25")
    with pytest.raises(ValueError, match="swaps"):
        inputs.prune(weight, "wanda", pattern="rows@0.25", swaps=3)


@given(st.integers(0, 9), st.integers(0, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_magnitude_is_the_plain_one(rows, cols, seed):
    dense = np.round(random(rows, cols, seed) * 4) / 4  # ties, zeros
    pruned = twofour.prune(dense)
    assert np.array_equal(pruned, two_largest(dense))
    assert not np.signbit(pruned[(pruned == 0) & (dense != 0)]).any()
    assert np.array_equal(twofour.prune(dense.T, axis=0), pruned.T)
    compressed = twofour.compress(pruned)
    assert np.array_equal(twofour.decompress(compressed), pruned)
    assert np.array_equal(twofour.decompress(twofour.compress(dense, prune=True)), pruned)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_method_and_dtype_of_a_tensor(device, method, dtype):
    dense = (torch.randn(40, 68) * 20).to(dtype).to(device)
    before = dense.clone()
    pruned = twofour.prune(dense, method)
    assert (pruned.dtype, pruned.device, pruned.shape) == (dense.dtype, dense.device, dense.shape)
    as_float, original = pruned.float(), dense.float()
    assert torch.equal(original, before.float())
    assert torch.equal(as_float, torch.where(as_float != 0, original, 0))
    assert twofour.verify(pruned).obeys
    assert method == "magnitude" or twofour.verify(pruned, axis=0).obeys
    assert as_float.count_nonzero() > 0.3 * as_float.numel()
    compressed = twofour.compress(pruned)
    assert compressed.values.shape == (40, 34) and compressed.meta.shape == (40, 3)
    assert (compressed.values.device, compressed.meta.dtype) == (dense.device, torch.int32)
    assert torch.equal(twofour.decompress(compressed).float(), as_float)


def test_optimal_keeps_at_least_as_much_as_greedy():
    dense = random(64, 64)
    kept = {method: np.abs(twofour.prune(dense, method)).sum() for method in METHODS}
    assert kept["magnitude"] > kept["optimal"] >= kept["greedy"] > kept["greedy-signed"]


def test_arrays_of_bits():
    tensor = torch.randn(16, 24).to(torch.bfloat16)
    bits = tensor.view(torch.uint16).numpy()
    pruned = twofour.prune(bits, dtype="bfloat16")
    assert pruned.dtype == np.uint16
    assert np.array_equal(pruned, twofour.prune(tensor).view(torch.uint16).numpy())
    compressed = twofour.compress(pruned, dtype="bfloat16")
    assert (compressed.dtype, compressed.values.dtype) == ("bfloat16", np.uint16)
    assert np.array_equal(compressed.to_dense(), pruned)
    assert compressed.nbytes == 16 * 12 * 2 + 16 * 4
    with pytest.raises(TypeError, match="requires an array of uint16; this one is of float32"):
        twofour.prune(np.zeros((4, 4), np.float32), dtype="bfloat16")


def test_arrays_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = random(8, 16).astype(ml_dtypes.bfloat16)
    pruned = twofour.prune(array)
    assert pruned.dtype == array.dtype and twofour.verify(pruned)
    assert twofour.compress(pruned).values.dtype == array.dtype


def test_any_memory_order():
    dense = random(12, 32)
    expected = twofour.prune(dense)
    big = np.zeros((24, 64), np.float32)
    big[::2, ::2] = dense
    unaligned = np.frombuffer(b"x" + dense.tobytes(), np.uint8)[1:].view(np.float32).reshape(dense.shape)
    read_only = dense.copy()
    read_only.setflags(write=False)
    for view in (np.asfortranarray(dense), big[::2, ::2], unaligned, read_only, dense.astype(">f4")):
        assert np.array_equal(twofour.prune(view), expected)
    tensor = torch.from_numpy(dense)
    assert np.array_equal(twofour.prune(tensor.t().contiguous().t()), expected)
    assert np.array_equal(twofour.prune(tensor.requires_grad_()), expected)


def test_a_sparse_tensor_counts_as_dense(device):
    sparse = twofour.sparse.to_sparse_semi_structured(torch.randn(32, 64, device=device), prune=True)
    assert twofour.verify(sparse).zeros == 0.5


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: twofour.compress(np.ones((3, 8), np.float32)), ValueError, "row 0, group 0: 4 non-zeros"),
        (lambda: twofour.prune(np.full((2, 8), np.nan, np.float32)), ValueError, "row 0, column 0: NaN"),
        (
            lambda: twofour.prune(np.zeros((2, 8), np.float32), "best"),
            ValueError,
            "`best`.*known: magnitude, greedy, greedy-signed, causal1122, optimal",
        ),
        (lambda: twofour.prune(np.zeros((2, 8), np.float32), "greedy", pattern="1:4"), ValueError, "not 1:4"),
        (lambda: twofour.prune(np.zeros((2, 8))), TypeError, "dtype float64 cannot"),
        (lambda: twofour.verify(np.zeros(8, np.float32)), ValueError, r"the shape is \[8\]"),
        (lambda: twofour.verify(np.zeros((2, 8), np.float32), "5:4"), ValueError, "write N:M"),
        (lambda: twofour.verify(np.zeros((2, 8), np.float32), axis=2), ValueError, "axis 2"),
        (lambda: twofour.verify("weights"), ValueError, r"the shape is \[\]"),
        (lambda: twofour.verify(torch.zeros(2, 8, device="meta")), TypeError, "meta"),
        (lambda: twofour.verify(torch.zeros(2, 8).to_sparse()), TypeError, "to_dense"),
        (lambda: twofour.decompress(np.zeros((2, 8), np.float32)), TypeError, "requires what compress returns"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_damaged_parts_are_named():
    compressed = twofour.compress(twofour.prune(random(4, 32)))
    meta = compressed.meta.copy()
    meta[2, 0] &= ~np.uint32(0xF0)
    damaged = twofour.Compressed(compressed.values, meta, compressed.shape, compressed.dtype)
    with pytest.raises(ValueError, match="row 2, group 1: metadata code 0x0"):
        twofour.decompress(damaged)
    short = twofour.Compressed(compressed.values[:3], compressed.meta, compressed.shape, compressed.dtype)
    with pytest.raises(ValueError, match="compressed values"):
        twofour.decompress(short)


def test_two_threads_and_a_fork():
    import multiprocessing
    from concurrent.futures import ThreadPoolExecutor

    dense = random(256, 256)
    expected = twofour.prune(dense)
    with ThreadPoolExecutor(2) as pool:
        assert all(np.array_equal(pruned, expected) for pruned in pool.map(twofour.prune, [dense] * 8))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert np.array_equal(pool.apply_async(twofour.prune, (dense,)).get(timeout=120), expected)
