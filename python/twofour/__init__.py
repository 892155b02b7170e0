"""2:4 semi-structured sparsity: prune, train, compress, run.

===========================  ===========================================================================================
:func:`verify`               is a matrix 2:4, and where not
:func:`prune`                makes it 2:4
:class:`LayerInputs`         prunes a layer by what enters it: SparseGPT, ALPS, refitting
:func:`compress`             values and metadata of a 2:4 matrix; :func:`decompress` undoes it
:func:`save_file`            models in the command line's file format; :func:`load_file`, :func:`load_model`
:class:`Store`               sparse matrices of other patterns: COO, CSR, CSC, BSR; to and from torch and scipy
:class:`Linear`              a linear layer with a 2:4 weight
:class:`Conv2d`              a convolution with a 2:4 weight; :class:`Conv1d`
:func:`to_dense`             makes a model dense again, for exporters to ONNX and the like
:func:`warm`                 plans the GEMMs of a model before its first call
:func:`set_tile_scheduler`   for GPUs on which other kernels, such as NCCL's, run beside ours
:func:`linear_layers`        the layers of a model that are worth pruning
:func:`advise`               measured speed of 2:4 against dense for a model's layers
:func:`low_rank_`            layers of a lower rank, by a budget, alone or beside 2:4; :func:`load_low_rank_` loads them
:func:`quantize_`            integers of 8 or 4 bits beside 2:4, under the names of ``torchao.quantization``
:func:`block_sparse_weight`  for ``twofour.sparsity.sparsify_``: weights of which whole blocks are zero
``twofour.sparse``           sparse tensors, under the names of ``torch.sparse``
``twofour.install()``        the same under torch's own names, for programs that cannot be changed
``twofour.sparsity``         pruning, and training with 2:4 weights or activations, as ``torchao.sparsity``
``twofour.pretrain``         pre-training recipes (FST, S-STE, STEP), under the names of the 2by4-pretrain toolkit
``twofour.recovery``         what a pruned model learns from the dense one: losses, and tuning of blocks
``twofour.transformers``     2:4 weights in Hugging Face transformers
``twofour.vllm``             2:4 weights in vLLM
===========================  ===========================================================================================

Functions of arrays and files require numpy alone. torch is imported when something that needs it is first used.
"""

import importlib
import importlib.util

from . import pickles
from ._native import __version__, engine, set_tile_scheduler

_SUBMODULES = {"pretrain", "quantization", "recovery", "sparse", "sparsity", "transformers", "vllm"}

#: Submodules that need the package of their name.
_INTEGRATIONS = {"transformers", "vllm"}

#: Modules and folders that need numpy alone.
_WITHOUT_TORCH = {"arrays", "device", "files"}

#: The modules of what is imported when it is first used.
_LAZY = {
    "BlockSparseTensor": "sparsity",
    "Compressed": "arrays.compression",
    "Conv1d": "modules.convolution",
    "Conv2d": "modules.convolution",
    "Int4Linear": "modules.int4",
    "LayerInputs": "arrays.layer",
    "LowRankLinear": "modules.low_rank",
    "Linear": "modules.linear",
    "PartViolation": "arrays.verification",
    "Store": "arrays.stores",
    "Verification": "arrays.verification",
    "Violation": "arrays.verification",
    "advise": "advice",
    "block_sparse_weight": "sparsity",
    "compress": "arrays.compression",
    "decompress": "arrays.compression",
    "device_info": "device",
    "install": "compat.install",
    "linear_layers": "modules.roles",
    "load_file": "files",
    "load_low_rank_": "modules.low_rank",
    "load_model": "files",
    "low_rank_": "modules.factoring",
    "prune": "arrays.pruning",
    "quantize_": "quantization",
    "save_file": "files",
    "to_dense": "modules.dense",
    "uninstall": "compat.install",
    "verify": "arrays.verification",
    "warm": "modules.warm",
}

_NAMES = ["__version__", "engine", "set_tile_scheduler", *sorted({*_LAZY, *_SUBMODULES})]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        # A stand-in for a package, which has no spec.
        return False


def _missing(name: str) -> set[str]:
    """Packages that a name needs and that are not installed."""
    module = _LAZY.get(name, name)
    is_lazy = name in _LAZY or name in _SUBMODULES
    needed = {module} & _INTEGRATIONS
    return _ABSENT & (needed | {"torch"} if is_lazy and module.partition(".")[0] not in _WITHOUT_TORCH else needed)


_ABSENT = {package for package in ("torch", *_INTEGRATIONS) if not _is_installed(package)}

#: What ``from twofour import *`` brings: what the installed packages suffice for.
__all__ = [name for name in _NAMES if not _missing(name)]


def __getattr__(name):
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _LAZY:
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return _NAMES
