"""The package's own modules: what imports what, and the names that they had in earlier versions."""

import copy
import importlib
import pathlib
import pickle
import re

import pytest
import torch

import twofour
from twofour import pickles

ROOT = pathlib.Path(twofour.__file__).parent
#: As CONTRIBUTING lists them: each imports only what stands before it.
ORDER = [
    "canonical",
    "operators",
    "arrays",
    "tensor",
    "device",
    "modules",
    "files",
    "advice",
    "sparse",
    "quantization",
    "pretrain",
    "sparsity",
    "compat",
    "integrations",
]
IMPORT = re.compile(r"^ *from (\.+)([\w.]*) import (\([^)]*\)|[^\n#]+)", re.MULTILINE)


def imported_by(path):
    """The folders and modules of the package that a file imports, where it is run and in its functions."""
    folder = ["twofour", *path.relative_to(ROOT).parent.parts]
    for dots, module, names in IMPORT.findall(path.read_text()):
        base = [*folder[: len(folder) - len(dots) + 1], *filter(None, module.split("."))]
        for name in names.strip("() \n").split(","):
            yield (*base, name.strip())[1]


def test_folders_import_only_what_stands_above_them():
    upward = set()
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own in ORDER:
            found = {name for name in imported_by(path) if name in ORDER and ORDER.index(name) > ORDER.index(own)}
            upward |= {f"{path.relative_to(ROOT)}: {name}" for name in found}
    assert not upward


@pytest.mark.parametrize("earlier", pickles._EARLIER)
def test_modules_are_found_by_their_earlier_names(earlier):
    assert importlib.import_module(earlier) is importlib.import_module(pickles._EARLIER[earlier])


def test_a_layer_that_was_compiled_is_pickled_and_copied_without_its_code():
    for layer in (twofour.Linear(16, 8), twofour.Int4Linear.from_dense(torch.nn.Linear(16, 8), prune=True)):
        layer.compile(backend="eager")
        x = torch.randn(3, 16)
        expected = layer(x)
        for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(same(x), expected) and same._compiled_call_impl is None
