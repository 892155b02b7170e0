"""Checking, pruning and compressing on a tensor's device: the functions are those of torch, so that they are compared
with the host's here, too; on a GPU the package's own functions are."""

import itertools

import pytest
import safetensors.torch
import torch
from conftest import devices

import twofour
from twofour.arrays import gpu as on_gpu
from twofour.sparse import to_sparse_semi_structured

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
SHAPES = [(1, 1), (3, 5), (4, 4), (37, 70), (64, 128), (5, 131)]
METHODS = ["magnitude", "greedy", "greedy-signed", "causal1122", "optimal"]

dtypes = pytest.mark.parametrize("dtype", DTYPES)
shapes = pytest.mark.parametrize("shape", SHAPES)
gpu = pytest.mark.skipif("cuda" not in devices(), reason="no GPU: what twofour does with tensors on one is not run")


def numbers(shape, dtype, device):
    """Ties, zeros of both signs, and the largest magnitude of int8."""
    dense = (torch.randn(shape) * 3).round()
    dense[torch.rand(shape) < 0.2] = -0.0
    dense[0, 0] = -128
    return dense.to(dtype).to(device)


def same_bits(a, b):
    assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def host(function, matrix, *args, **kwargs):
    return function(matrix.cpu(), *args, **kwargs)


@dtypes
@shapes
@pytest.mark.parametrize("pattern", ["2:4", "1:2", "3:7", "4:4"])
def test_violations_are_the_hosts(device, dtype, shape, pattern):
    dense = numbers(shape, dtype, device)
    for axis, places in itertools.product((0, 1), (0, 3, 8)):
        expected = host(twofour.verify, dense, pattern, axis, places=places)
        groups, violating, first, zeros = on_gpu.conformity(dense, pattern, axis, places)
        assert (groups, violating) == (expected.groups, expected.violating_groups)
        allowed = int(pattern[0])
        listed = [(v.line, v.group, None, None, v.nonzeros, allowed) for v in expected.first_violations]
        assert [tuple(place) for place in first] == listed
        assert zeros / dense.numel() == expected.zeros


@dtypes
@shapes
@pytest.mark.parametrize("method", METHODS)
def test_pruned_matrices_are_the_hosts(device, dtype, shape, method):
    dense = numbers(shape, dtype, device)
    for axis in (0, 1):
        same_bits(on_gpu.pruned(dense, "2:4", axis, method).cpu(), host(twofour.prune, dense, method, axis))


@dtypes
@shapes
def test_compressed_matrices_are_the_hosts(device, dtype, shape):
    dense = numbers(shape, dtype, device)
    for matrix, prune in ((dense, True), (host(twofour.prune, dense).to(device), False)):
        expected = host(twofour.compress, matrix, prune=prune)
        values, meta = on_gpu.compressed(matrix, prune)
        same_bits(values.cpu(), expected.values)
        same_bits(meta.cpu(), expected.meta)


def test_every_group_of_two_is_compressed_as_the_host_does(device):
    dense = torch.tensor(
        [bits for bits in itertools.product((0.0, -0.0, 1.5), repeat=4) if sum(b != 0 for b in bits) <= 2],
        device=device,
    )
    values, meta = on_gpu.compressed(dense, False)
    expected = host(twofour.compress, dense)
    same_bits(values.cpu(), expected.values)
    same_bits(meta.cpu(), expected.meta)


def test_the_host_says_what_is_wrong(device):
    dense = torch.ones(8, 8, device=device)
    assert on_gpu.compressed(dense, False) is None
    dense[2, 3] = torch.nan
    assert on_gpu.compressed(dense, True) is None
    assert all(on_gpu.pruned(dense, "2:4", axis, method) is None for axis in (0, 1) for method in METHODS)
    assert on_gpu.pruned(dense, "1:4", 1, "magnitude") is None
    assert on_gpu.pruned(dense, "2:4", 1, "best") is None
    assert on_gpu.conformity(dense, "two of four", 1, 8) is None
    # A NaN that need not be ordered is a value.
    single = torch.zeros(4, 8, device=device)
    single[1, 2] = torch.nan
    same_bits(on_gpu.compressed(single, False)[0].cpu(), host(twofour.compress, single).values)


def test_only_matrices_on_a_gpu_are_taken(device):
    dense = torch.ones(8, 8, device=device)
    assert (on_gpu.of(dense) is not None) == (device == "cuda")
    for other in (dense.cpu(), dense[0], dense[:0], dense.long(), dense.to_sparse(), [[1.0]]):
        assert on_gpu.of(other) is None


@gpu
@dtypes
def test_a_tensor_on_a_gpu_stays_there(dtype):
    dense = numbers((37, 70), dtype, "cuda")
    pruned, compressed = twofour.prune(dense), twofour.compress(dense, prune=True)
    same_bits(pruned.cpu(), twofour.prune(dense.cpu()))
    same_bits(compressed.values.cpu(), twofour.compress(dense.cpu(), prune=True).values)
    assert {pruned.device.type, compressed.values.device.type, compressed.meta.device.type} == {"cuda"}
    assert twofour.verify(dense) == twofour.verify(dense.cpu())
    # Compressing turns -0.0 into +0.0, pruning keeps it.
    same_bits(twofour.decompress(compressed).cpu(), twofour.decompress(twofour.compress(dense.cpu(), prune=True)))


@gpu
def test_a_tensor_on_a_gpu_is_refused_as_on_the_host():
    dense = torch.ones(8, 8, device="cuda")
    with pytest.raises(ValueError, match="row 0, group 0"):
        twofour.compress(dense)
    dense[2, 3] = torch.nan
    for axis in (0, 1):
        with pytest.raises(ValueError, match="row 2, column 3"):
            twofour.prune(dense, axis=axis)
    with pytest.raises(TypeError):
        twofour.prune(dense.double())
    with pytest.raises(ValueError, match="reshape"):
        twofour.verify(dense[0])


@gpu
def test_a_model_on_a_gpu_is_saved_as_from_the_host(tmp_path):
    model = (
        torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 128), torch.nn.Linear(128, 256))
        .cuda()
        .bfloat16()
        .requires_grad_(False)
    )
    model[0].weight = torch.nn.Parameter(to_sparse_semi_structured(model[0].weight, prune=True), requires_grad=False)
    model[1].weight.copy_(twofour.prune(model[1].weight))
    model[2] = twofour.Int4Linear.from_dense(model[2], prune=True)
    files = [tmp_path / "gpu.safetensors", tmp_path / "host.safetensors"]
    twofour.save_file(model, files[0], compress="1.weight")
    twofour.save_file(model.cpu(), files[1], compress="1.weight")
    found, expected = (safetensors.torch.load_file(file) for file in files)
    assert list(found) == list(expected)
    assert [
        name for name in found if not torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))
    ] == []
    assert files[0].read_bytes() == files[1].read_bytes()
