#!/usr/bin/env python3
"""Imports point one way: no circle among the modules of a folder of a crate. `.ci/check_imports.py [FOLDER]...`

For each folder (by default each crate's `src`, and folders named below) an edge goes from a module to another whose
path one of its files names: in a `use`, or in code outside comments, strings and unit tests. `error` is left out, as
every module returns its type. A name that the crate re-exports counts as the module that it comes from.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INNER = ["crates/twofour-nn/src/model"]
LEAVES = {"error", "lib", "main", "tests"}
# Comments, raw strings, characters (which may be a quote), strings.
NO_CODE = re.compile(r"""//[^\n]*|r(#+)".*?"\1|'(?:\\.|[^\\'])'|"(?:\\.|[^"\\])*\"""", re.DOTALL)


def line_breaks(found: re.Match[str]) -> str:
    """What a match is replaced by, so that lines keep their numbers."""
    return "\n" * found.group().count("\n")


def code_of(path: pathlib.Path) -> str:
    """The file without comments, strings and its unit tests."""
    text = path.read_text()
    tests = re.search(r"#\[cfg\(test\)\]\s*(?:pub\(crate\) )?mod \w+ \{", text)
    text = text[: tests.start()] if tests else text
    text = re.sub(r"#\[cfg\(doc\)\]\s*use [^;]*;", line_breaks, text)
    return NO_CODE.sub(line_breaks, text)


def expand(prefix: str, inside: str) -> list[str]:
    """The paths of a `use`, its braces expanded. Of a path with `as` that is the path, not the new name."""
    found, depth, item = [], 0, ""
    for letter in inside + ",":
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            item = item.strip()
            open_brace = item.find("{")
            if open_brace >= 0:
                found += expand(prefix + item[:open_brace], item[open_brace + 1 : item.rindex("}")])
            elif item:
                found.append(prefix + item.split(" as ")[0].strip())
            item = ""
        else:
            item += letter
    return found


def paths_of(code: str) -> list[tuple[int, list[str]]]:
    """Each path that begins with `crate` or `super`, with its line; braces of a `use` are expanded."""
    found = []
    for use in re.finditer(r"\buse\s+((?:crate|super)(?:::\w+)*)::\{", code):
        depth, end = 1, use.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        line = code.count("\n", 0, use.start()) + 1
        found += [(line, path.split("::")) for path in expand(use.group(1) + "::", code[use.end() : end - 1])]
    for path in re.finditer(r"\b(?:crate|super)(?:::\w+)+", code):
        found.append((code.count("\n", 0, path.start()) + 1, path.group().split("::")))
    return found


def module_of(path: pathlib.Path, source: pathlib.Path) -> list[str]:
    parts = list(path.relative_to(source).with_suffix("").parts)
    return parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts


def re_exports(source: pathlib.Path, folder: list[str]) -> dict[str, str]:
    """The names that the folder's own file imports or re-exports, each with the module that it comes from."""
    files = [source.joinpath(*folder, "mod.rs")] if folder else [source / "lib.rs", source / "main.rs"]
    found = {}
    for path in filter(pathlib.Path.exists, files):
        for use in re.finditer(r"\buse\s+([^;]*);", code_of(path)):
            for item in expand("", use.group(1)):
                parts = [part for part in item.split("::") if part not in ("self", "crate")]
                if folder and parts[: len(folder)] == folder:
                    parts = parts[len(folder) :]
                if len(parts) > 1:
                    found[parts[-1]] = parts[0]
    return found


def edges_of(folder: pathlib.Path) -> dict[str, dict[str, list[str]]]:
    source = next(path for path in [folder, *folder.parents] if path.name == "src")
    here = list(folder.relative_to(source).parts)
    modules = {path.stem if path.is_file() else path.name for path in folder.iterdir()} - {"lib", "main", "mod"}
    exported = re_exports(source, here)
    edges = {module: {} for module in modules - LEAVES}
    for path in sorted(folder.rglob("*.rs")):
        own = module_of(path, source)
        if len(own) <= len(here) or any(part == "tests" or part.endswith("_tests") for part in own):
            continue
        module = own[len(here)]
        if module not in edges:
            continue
        for line, parts in paths_of(code_of(path)):
            full = []
            base = own
            for part in parts:
                if part == "crate":
                    full, base = [], []
                elif part == "super":
                    base = base[:-1]
                    full = list(base)
                else:
                    full.append(part)
            if full[: len(here)] != here or len(full) <= len(here):
                continue
            name = full[len(here)]
            target = name if name in modules else exported.get(name)
            if target in edges and target != module:
                edges[module].setdefault(target, []).append(f"{path.relative_to(ROOT)}:{line}")
    return edges


def circles(edges: dict[str, dict[str, list[str]]]) -> list[list[str]]:
    """Sets of modules each of which reaches all others."""
    reach = {}
    for start in edges:
        seen, stack = set(), [start]
        while stack:
            for target in edges[stack.pop()]:
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        reach[start] = seen
    found = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in edges if a in reach[a]}
    return [list(circle) for circle in sorted(found)]


def main() -> None:
    given = [ROOT / path for path in sys.argv[1:]]
    folders = given or [*sorted(ROOT.glob("crates/*/src")), *(ROOT / path for path in INNER)]
    failed = False
    for folder in folders:
        edges = edges_of(folder.resolve())
        for circle in circles(edges):
            failed = True
            print(f"{folder.relative_to(ROOT)}: {', '.join(circle)} import each other:")
            for module in circle:
                for target in circle:
                    places = edges[module].get(target, [])
                    if places:
                        print(f"  {module} -> {target}, {len(places)} times: {', '.join(places[:3])}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
