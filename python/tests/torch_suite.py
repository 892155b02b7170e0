"""Loads torch's own tests of 2:4 tensors, so that they run on twofour: on a CPU, or on a GPU.

The file is ``test/test_sparse_semi_structured.py`` of PyTorch. No wheel has it: take it from PyTorch's repository, at a
version near that of the torch that is installed. It needs ``pip install expecttest``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import pathlib
import re
import sys
import types
import unittest
from unittest import mock

import torch

import twofour

#: What is replaced in the file's text: it is written for CUDA alone, and chooses its cases by what torch's kernels run
#: on.
REPLACED = (
    ('device="cuda"', "device=DEVICE"),
    (".cuda()", ".to(DEVICE)"),
    ('only_for="cuda"', "only_for=DEVICE"),
    (
        "\ninference_dtypes = dtypes(",
        "\n_IS_SM8X = True"
        "\nSEMI_STRUCTURED_SUPPORTED_BACKENDS.update("
        "cutlass=SparseSemiStructuredTensorCUTLASS, cusparselt=SparseSemiStructuredTensorCUSPARSELT)"
        "\ninference_dtypes = dtypes(",
    ),
    # torch's conversion in C++ is for CUDA alone; its reference in Python is for any device.
    ("torch.ops.aten._to_sparse_semi_structured(", "sparse_semi_structured_from_dense_cutlass("),
)


@dataclasses.dataclass(frozen=True)
class Exemption:
    """Cases that are not to pass, and why.

    Attributes:
        pattern: a regular expression, searched in the case's name.
        outcome: ``"fails"``, ``"skipped"``, or ``"not run"``.
        reason: what differs.
        instead: the test of ``test_torch_suite.py`` that compares with dense what torch refuses and twofour computes.
        device: the only device it is for, or ``None``.
    """

    pattern: str
    outcome: str
    reason: str
    instead: str | None = None
    device: str | None = None


EXEMPTIONS = (
    Exemption(
        r"\.test_mm_sparse_(first_TN|second_NN).*float16",
        "fails",
        "torch refuses a product along the dimension that the matrix is not packed along; here only shapes must fit",
        "test_floats_along_either_dimension",
    ),
    Exemption(
        r"\.test_mm_sparse_first_(NN.*int8|NT.*dense_input_shape0.*int8)",
        "fails",
        "torch refuses int8 operands in this order of memory",
        "test_integers_in_either_order_of_memory",
    ),
    Exemption(r"\.test_unsupported_shape_", "fails", "torch refuses small and odd shapes", "test_small_and_odd_shapes"),
    Exemption(
        r"\.test_semi_sparse_to_",
        "fails",
        "in torch .to makes a dense tensor of it on a CPU and refuses the rest; here it stays sparse, on every device "
        "and in every type",
        "test_to_keeps_it_sparse",
    ),
    Exemption(
        r"\.test_(sp24_matmuls_(mat_vec|bmm)|conversions_all_patterns)_",
        "fails",
        "data that is not 2:4 loses elements in torch; here it is refused",
        "test_what_is_not_sparse_is_refused_and_vectors_and_batches_are_multiplied",
    ),
    Exemption(
        r"\.test_csrc_cslt_sparse_mm_search_", "fails", "calls NVIDIA's library through torch's internals", device="cpu"
    ),
    Exemption(
        r"\.test_cusparselt_backend_", "not run", "asks torch for NVIDIA's library, which the loader answers for"
    ),
    Exemption(r"\.test_cslt_sparse_mm_alpha_(cpu|cuda)_", "skipped", "skipped upstream"),
    Exemption(r"\.test_cslt_sparse_mm_fp8_unsupported_out_dtype_rocm_", "skipped", "for ROCm"),
)


def _of_any_device(function):
    """A helper of torch's that makes tensors on a GPU, whatever its argument is on, made to use the argument's
    device."""
    source = inspect.getsource(function).replace(
        'device="cuda"', f"device={next(iter(inspect.signature(function).parameters))}.device"
    )
    names: dict = {}
    exec(source, function.__globals__, names)
    return names[function.__name__]


@contextlib.contextmanager
def _surroundings(device: str):
    """twofour in torch's place, and what the file asks torch's test helpers and cuSPARSELt for, as where all of it is
    there."""
    from torch.sparse import _semi_structured_conversions as conversions
    from torch.testing._internal import common_cuda, inductor_utils

    # Named otherwise, or absent, in other versions of torch.
    helpers = types.ModuleType("torch.testing._internal.common_gpu")
    helpers.PLATFORM_SUPPORTS_FP8 = True
    with contextlib.suppress(ImportError):
        importlib.import_module(helpers.__name__)
    sys.modules.setdefault(helpers.__name__, helpers)
    bitmask = _of_any_device(conversions._compute_compressed_swizzled_bitmask)
    with contextlib.ExitStack() as stack:
        stack.enter_context(twofour.install())
        stack.enter_context(mock.patch.object(conversions, bitmask.__name__, bitmask))
        stack.enter_context(mock.patch.object(common_cuda, "PLATFORM_SUPPORTS_FP8_SPARSE", True, create=True))
        if device == "cpu":
            stack.enter_context(mock.patch.object(common_cuda, "PLATFORM_SUPPORTS_FP8", True))
            stack.enter_context(
                mock.patch.object(sys.modules[helpers.__name__], "PLATFORM_SUPPORTS_FP8", True, create=True)
            )
            stack.enter_context(mock.patch.object(inductor_utils, "HAS_GPU", True))
        stack.enter_context(mock.patch.object(torch.backends.cusparselt, "is_available", lambda: True))
        if torch.backends.cusparselt.version() is None:
            stack.enter_context(mock.patch.object(torch.backends.cusparselt, "version", lambda: 602))
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """One of the file's cases, for one device."""

    test: unittest.TestCase
    device: str

    @property
    def name(self) -> str:
        return f"{type(self.test).__name__}.{self.test._testMethodName}"

    def exemption(self) -> Exemption | None:
        """The first that applies."""
        return next(
            (e for e in EXEMPTIONS if e.device in (None, self.device) and re.search(e.pattern, self.name)), None
        )

    def run(self) -> tuple[str, str]:
        """Runs the case.

        Returns:
            ``"passes"``, ``"fails"``, ``"skipped"`` or ``"not run"``; and the traceback, or the reason.
        """
        exemption = self.exemption()
        if exemption is not None and exemption.outcome == "not run":
            return "not run", exemption.reason
        result = unittest.TestResult()
        with _surroundings(self.device):
            # A suite of one runs what the class sets up, too.
            unittest.TestSuite([self.test]).run(result)
        if result.failures or result.errors:
            return "fails", (result.failures + result.errors)[0][1]
        if result.skipped:
            return "skipped", result.skipped[0][1]
        return "passes", ""


def load(path: str, device: str) -> list[Case]:
    """The cases of torch's file for a device.

    Raises:
        ValueError: where the file is not what the replacements are for; the message names the text that is missing.
    """
    source = pathlib.Path(path).read_text()
    for old, new in REPLACED:
        if old not in source:
            raise ValueError(
                f"{path} has no {old!r}: it is not a version of test_sparse_semi_structured.py that this loader knows"
            )
        source = source.replace(old, new)
    module = types.ModuleType(f"torch_sparse_semi_structured_{device}")
    module.__file__ = path
    module.DEVICE = device
    # torch's decorators and pickling look a class's module up.
    sys.modules[module.__name__] = module
    with _surroundings(device):
        exec(compile(source, path, "exec"), module.__dict__)
    loader = unittest.TestLoader()
    return [Case(test, device) for suite in loader.loadTestsFromModule(module) for test in suite]
