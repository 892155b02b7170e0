"""What ``torch.load(weights_only=True)`` may call to restore sparse tensors, known to torch from ``import twofour`` on.

torch is not imported for it: where it is not loaded yet, it is told when it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

#: The modules of the functions that restore a pickled tensor; each is named ``_rebuild``.
_MODULES = ("twofour._tensor", "twofour.sparsity.blocksparse")

_ASKED_BY = "torch.serialization"


def _rebuilder(module: str):
    def rebuild(*parts):
        return importlib.import_module(module)._rebuild(*parts)

    return rebuild


def _tell_torch() -> None:
    sys.modules[_ASKED_BY].add_safe_globals([(_rebuilder(module), f"{module}._rebuild") for module in _MODULES])


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


if _ASKED_BY in sys.modules:
    _tell_torch()
else:
    sys.meta_path.insert(0, _Finder())
