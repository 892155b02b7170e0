"""2:4 semi-structured sparsity: prune, train, compress, run.

======================  ==============================================================================================
``twofour.sparse``      sparse tensors, under the names of ``torch.sparse``
``twofour.install()``   the same under torch's own names, for programs that cannot be changed
``twofour.sparsity``    pruning, and training with 2:4 weights or activations, under the names of ``torchao.sparsity``
``twofour.pretrain``    pre-training recipes (FST, S-STE, STEP), under the names of the 2by4-pretrain toolkit
======================  ==============================================================================================

torch is imported when something that needs it is first used.
"""

import importlib

from ._native import __version__, engine

_SUBMODULES = {"pretrain", "sparse", "sparsity"}

#: Names that are imported when they are first used, and their modules.
_LAZY = {"install": "_install", "uninstall": "_install"}

__all__ = ["__version__", "engine", *sorted(_SUBMODULES), *sorted(_LAZY)]


def __getattr__(name):
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
