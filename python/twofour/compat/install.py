"""Replaces torch's 2:4 tensors and operators by twofour's, so that unmodified programs run: on CPUs, and on GPUs where
torch refuses."""

from __future__ import annotations

import warnings

import torch

from .. import sparse
from .torch_operators import CUTLASS, OPERATORS

_NAMES = (
    "SparseSemiStructuredTensor",
    "SparseSemiStructuredTensorCUTLASS",
    "SparseSemiStructuredTensorCUSPARSELT",
    "to_sparse_semi_structured",
)

_installed: _Installed | None = None


class _Installed:
    """What :func:`install` changed. As a context manager it undoes that at the end."""

    def __init__(self):
        self.replaced = {name: getattr(torch.sparse, name) for name in _NAMES}
        module = torch.sparse.semi_structured
        self.replaced_in_module = {name: getattr(module, name) for name in _NAMES}
        for name in _NAMES:
            setattr(torch.sparse, name, getattr(sparse, name))
            setattr(module, name, getattr(sparse, name))
        self.libraries = [_register("CPU")]
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 8:
            # torch's CUTLASS kernels are for compute capability 8 alone; its cuSPARSELt kernels stay.
            self.libraries.append(_register("CUDA", only=CUTLASS))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        uninstall()

    def undo(self):
        for library in self.libraries:
            library._destroy()
        for name, value in self.replaced.items():
            setattr(torch.sparse, name, value)
        for name, value in self.replaced_in_module.items():
            setattr(torch.sparse.semi_structured, name, value)


def install() -> _Installed:
    """Puts twofour's classes and ``to_sparse_semi_structured`` into ``torch.sparse``, and registers kernels for
    ``torch._sparse_semi_structured_tile``, ``_apply``, ``_apply_dense``, ``_mm``, ``_addmm`` and ``_linear``,
    ``torch._cslt_compress``, ``_cslt_sparse_mm`` and ``_cslt_sparse_mm_search``: on CPUs, where torch has none, and on
    GPUs where torch's refuse to run.

    A second call changes nothing. The result is a context manager::

        with twofour.install():
            run_a_program_that_uses_torch_sparse()
    """
    global _installed
    if _installed is None:
        _installed = _Installed()
    return _installed


def uninstall() -> None:
    """Undoes :func:`install`; without one it does nothing."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None


def _register(key: str, only: dict | None = None) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", key)
    with warnings.catch_warnings():
        # torch warns of a kernel that is replaced, which is what this is for.
        warnings.simplefilter("ignore")
        for name, kernel in (OPERATORS if only is None else only).items():
            library.impl(name, kernel)
    return library
