"""What all tests share."""

import sys

import pytest
import torch


def devices():
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=devices())
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _compile_anew():
    """What other tests compiled does not count towards the limit of recompilations."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


#: Relative error of one rounding of each type, times a few sums' worth.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(found, expected, dtype=None):
    """Asserts that a GEMM's result is within rounding of a reference computed in float64."""
    dtype = dtype or found.dtype
    tolerance = TOLERANCE[dtype]
    expected = expected.double()
    scale = expected.abs().max().clamp(min=1e-6)
    error = (found.double() - expected).abs().max() / scale
    assert error <= tolerance, f"relative error {error:.2e} of {dtype}"
