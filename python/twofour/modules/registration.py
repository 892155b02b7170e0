"""Tells transformers of this package's layers."""

from __future__ import annotations

import contextlib
import importlib
import sys


def with_transformers() -> None:
    """Registers with transformers where a program uses it, so that ``save_pretrained`` of a model with a new layer
    writes what is read again.

    Every layer with a packed weight, and every layer that prunes in training, calls it when it is made; the former when
    they are unpickled, too, since their model's attention may be ``twofour``.
    """
    if "transformers.modeling_utils" in sys.modules and "twofour.transformers" not in sys.modules:
        # One that is too old for it has no model to save.
        with contextlib.suppress(ImportError):
            importlib.import_module("twofour.transformers")
