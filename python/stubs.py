#!/usr/bin/env python3
"""Writes python/twofour/_native.pyi, the typed stub of the native module.

    python python/stubs.py            # writes the stub
    python python/stubs.py --check    # fails where the stub is not what would be written

Names, defaults and documentation are those of the built module, types those of its Rust source in python/src. A
function that only one of the two has, an argument that differs, and a Rust type without an entry in the table below are
errors. The module is that of this folder where it was built in place, else the installed one.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import inspect
import pathlib
import re
import sys
import textwrap

HERE = pathlib.Path(__file__).resolve().parent
STUB = HERE / "twofour" / "_native.pyi"

HEAD = '''"""The native part of the package. Written by python/stubs.py: run it again instead of editing this file."""

import os
from typing import Self, final

import numpy as np
import numpy.typing as npt
'''

#: Python types of Rust types without parameters.
SIMPLE = {
    "()": "None",
    "&str": "str",
    "&'static str": "str",
    "String": "str",
    "OsString": "str",
    "PathBuf": "str | os.PathLike[str]",
    "bool": "bool",
    "f64": "float",
    "i64": "int",
    "u64": "int",
    "usize": "int",
    "Self": "Self",
    "Bound<'py, PyTuple>": "tuple[object, ...]",
}

#: numpy types of the elements of arrays.
ELEMENTS = {"u8": "np.uint8", "u32": "np.uint32", "i64": "np.int64", "f32": "np.float32"}

#: Arguments that Python's callers do not pass.
IMPLICIT = {"&self", "&mut self", "py: Python<'_>", "py: Python<'py>"}


class StubError(Exception):
    """The source or the module holds something that this script cannot describe."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A function's Rust types, by argument, and that of its result."""

    arguments: dict[str, str]
    result: str


def split(text: str) -> list[str]:
    """The parts between commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "(<[") - (char in ")>]" and text[index - 1 : index + 1] != "->")
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def python_type(rust: str, aliases: dict[str, str]) -> str:
    """The Python type of a Rust type.

    Raises:
        StubError: for one that no table has.
    """
    rust = aliases.get(rust.removesuffix("<'py>"), rust).strip()
    if rust in SIMPLE:
        return SIMPLE[rust]
    if rust.startswith("(") and rust.endswith(")"):
        return f"tuple[{', '.join(python_type(part, aliases) for part in split(rust[1:-1]))}]"
    generic = re.fullmatch(r"(?:mut )?(\w+)<(.*)>", rust)
    if generic:
        name, parts = generic[1], [part for part in split(generic[2]) if not part.startswith("'")]
        if name in ("PyReadonlyArray1", "PyReadwriteArray1", "PyArray1") and parts[0] in ELEMENTS:
            return f"npt.NDArray[{ELEMENTS[parts[0]]}]"
        inner = [python_type(part, aliases) for part in parts]
        if name in ("PyResult", "Bound"):
            return inner[0]
        if name == "Option":
            return f"{inner[0]} | None"
        if name == "Vec":
            return f"list[{inner[0]}]"
        if name == "BTreeMap":
            return f"dict[{', '.join(inner)}]"
    raise StubError(f"no Python type for the Rust type `{rust}`: add it to the tables of {pathlib.Path(__file__).name}")


_FUNCTION = r"(?:pub(?:\([^)]*\))? )?fn (\w+)(?:<'py>)?\((.*?)\)(?: -> ([^{]+?))? \{"


def functions_in(text: str, marker: str) -> dict[str, Function]:
    """The functions after a marker, a regular expression, by name."""
    found = {}
    for match in re.finditer(rf"{marker}{_FUNCTION}", text, re.DOTALL):
        arguments = {}
        for argument in split(re.sub(r"\s+", " ", match[2])):
            if argument not in IMPLICIT:
                name, _, rust = argument.partition(": ")
                arguments[name.removeprefix("mut ")] = rust
        found[match[1]] = Function(arguments, (match[3] or "()").strip())
    return found


@dataclasses.dataclass
class Source:
    """What the Rust source says."""

    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    constants: set[str] = dataclasses.field(default_factory=set)
    functions: dict[str, Function] = dataclasses.field(default_factory=dict)
    classes: dict[str, dict[str, Function]] = dataclasses.field(default_factory=dict)


def read_source() -> Source:
    """Reads the crate's files."""
    source = Source()
    for path in sorted((HERE / "src").rglob("*.rs")):
        text = path.read_text()
        alias = r"^(?:pub(?:\([^)]*\))? )?type (\w+)(?:<'py>)? = ([^;]+);"
        source.aliases.update(re.findall(alias, text, re.MULTILINE))
        source.constants.update(re.findall(r'\bmodule\.add\("(\w+)"', text))
        source.functions.update(functions_in(text, r"#\[pyfunction\]\s+(?:#\[[^\n]*\]\s+)*"))
        for block in re.finditer(r"^#\[pymethods\]\nimpl (\w+) \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
            source.classes[block[1]] = functions_in(block[2], r"(?m:^)    ")
    return source


def documented(item, indent: str) -> str:
    """The documentation of a function or class, as a docstring."""
    if not item.__doc__:
        raise StubError(f"{item!r} has no documentation")
    paragraphs = (" ".join(text.split()) for text in inspect.cleandoc(item.__doc__).split("\n\n"))
    wrapped = "\n\n".join(textwrap.fill(text, 113 - len(indent)) for text in paragraphs).splitlines()
    body = "\n".join(wrapped).replace("\\", "\\\\")
    closing = '"""' if len(wrapped) == 1 else '\n"""'
    return textwrap.indent(f'"""{body}{closing}', indent)


def definition(
    name: str, item, function: Function, aliases: dict[str, str], indent: str = "", receiver: str | None = None
) -> str:
    """The stub of a function.

    Raises:
        StubError: where its arguments are not those of the source.
    """
    signature = [p for p in inspect.signature(item).parameters.values() if p.name not in ("self", "cls")]
    if [p.name for p in signature] != list(function.arguments):
        raise StubError(
            f"{name}: the module has the arguments {[p.name for p in signature]}, the source {list(function.arguments)}"
        )
    arguments = [] if receiver is None else [receiver]
    for parameter in signature:
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        arguments.append(f"{parameter.name}: {python_type(function.arguments[parameter.name], aliases)}{default}")
    result = python_type(function.result, aliases)
    head = f"{indent}def {name}({', '.join(arguments)}) -> {result}:"
    if len(head) > 120:
        joined = "".join(f"{indent}    {argument},\n" for argument in arguments)
        head = f"{indent}def {name}(\n{joined}{indent}) -> {result}:"
    return f"{head}\n"


def class_stub(name: str, cls: type, methods: dict[str, Function], aliases: dict[str, str]) -> str:
    """The stub of a class.

    Raises:
        StubError: where its methods are not those of the source.
    """
    public = {method for method in vars(cls) if not method.startswith("_")}
    if public | {"new"} != set(methods):
        raise StubError(f"{name}: the module has the methods {sorted(public)}, the source {sorted(methods)}")
    parts = [f"@final\nclass {name}:\n{documented(cls, '    ')}\n"]
    new = Function(methods["new"].arguments, "Self")
    parts.append(definition("__new__", cls, new, aliases, "    ", "cls").rstrip("\n") + " ...\n")
    for method, function in methods.items():
        if method != "new":
            item = getattr(cls, method)
            parts.append(
                f"{definition(method, item, function, aliases, '    ', 'self')}{documented(item, '        ')}\n"
            )
    return "\n".join(parts)


def constant_type(name: str, value: object) -> str:
    """The type of a constant: that of its value, and of the entries of a dictionary.

    Raises:
        StubError: for a dictionary whose entries have several types.
    """
    if not isinstance(value, dict):
        return type(value).__name__
    types = {(type(key).__name__, type(entry).__name__) for key, entry in value.items()}
    if len(types) != 1:
        raise StubError(f"{name}: entries of several types: {sorted(types)}")
    return f"dict[{', '.join(types.pop())}]"


def stub(module, source: Source) -> str:
    """The stub of the module.

    Raises:
        StubError: where module and source differ, or a type has no Python type.
    """
    public = {name: getattr(module, name) for name in dir(module) if not name.startswith("_") or name == "__version__"}
    described = {*source.constants, *source.functions, *source.classes}
    if set(public) != described:
        raise StubError(f"only one of module and source has {sorted(set(public) ^ described)}: build the module anew")
    parts = [
        f"{HEAD}\n" + "".join(f"{name}: {constant_type(name, public[name])}\n" for name in sorted(source.constants))
    ]
    for name, function in sorted(source.functions.items()):
        parts.append(f"{definition(name, public[name], function, source.aliases)}{documented(public[name], '    ')}\n")
    for name, methods in sorted(source.classes.items()):
        parts.append(class_stub(name, public[name], methods, source.aliases))
    return "\n".join(parts)


def native():
    """The native module: this folder's, where it was built in place, or the installed one."""
    if not list((HERE / "twofour").glob("_native*.so")):
        sys.path[:] = [path for path in sys.path if pathlib.Path(path).resolve() != HERE]
    return importlib.import_module("twofour._native")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the file differs")
    check = parser.parse_args().check
    try:
        written = stub(native(), read_source())
    except StubError as error:
        raise SystemExit(f"stubs.py: {error}") from None
    compile(written, str(STUB), "exec")
    if not check:
        STUB.write_text(written)
        return
    found = STUB.read_text() if STUB.exists() else ""
    if found != written:
        sys.stdout.writelines(
            difflib.unified_diff(found.splitlines(True), written.splitlines(True), "_native.pyi", "what it should be")
        )
        raise SystemExit(f"{STUB} differs from the native module: run python python/stubs.py")


if __name__ == "__main__":
    main()
