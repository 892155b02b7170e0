"""Names by which pickles find what they hold: those of earlier versions, and what ``torch.load(weights_only=True)`` may
call, from ``import twofour`` on.

torch is not imported for it: where it is not loaded yet, it is told when it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

#: Modules by the names that they had before.
_EARLIER = {
    "twofour._advice": "twofour.advice",
    "twofour._compression": "twofour.arrays.compression",
    "twofour._device": "twofour.device",
    "twofour._int4": "twofour.modules.int4",
    "twofour._linear": "twofour.modules.linear",
    "twofour._memory": "twofour.tensor.memory",
    "twofour._ops": "twofour.operators",
    "twofour._packed": "twofour.operators.packed",
    "twofour._packed_buffer": "twofour.modules.packed_buffer",
    "twofour._quantized": "twofour.modules.integers",
    "twofour._tensor": "twofour.tensor.semi_structured",
    "twofour._tracing": "twofour.modules.tracing",
    "twofour._verification": "twofour.arrays.verification",
    "twofour.sparsity._sparsify": "twofour.tensor.sparsify",
}

#: The modules of the functions that restore a pickled tensor, each named ``_rebuild``, by the names that pickles have
#: for them.
_REBUILDERS = (
    "twofour.tensor.semi_structured",
    "twofour._tensor",
    "twofour.tensor.blocksparse",
    "twofour.sparsity.blocksparse",
)

_ASKED_BY = "torch.serialization"


class _Earlier:
    """Finds a module by an earlier name: the same object."""

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name in _EARLIER else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        sys.modules[module.__name__] = importlib.import_module(_EARLIER[module.__name__])


def _rebuilder(module: str):
    def rebuild(*parts):
        return importlib.import_module(module)._rebuild(*parts)

    return rebuild


def _tell_torch() -> None:
    sys.modules[_ASKED_BY].add_safe_globals([(_rebuilder(module), f"{module}._rebuild") for module in _REBUILDERS])


class _Finder:
    """Waits for torch's module to be imported, and is gone then."""

    def find_spec(self, name, path=None, target=None):
        if name != _ASKED_BY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module):
                execute(module)
                _tell_torch()

            spec.loader.exec_module = execute_and_tell
        return spec


# Behind all others: what is found otherwise has its name.
sys.meta_path.append(_Earlier())
if _ASKED_BY in sys.modules:
    _tell_torch()
else:
    sys.meta_path.insert(0, _Finder())
