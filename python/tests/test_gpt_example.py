"""The example that trains a GPT, and the study that repeats it over seeds."""

import importlib.util
import json
import math
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = [
    "--steps",
    "12",
    "--batch",
    "4",
    "--context",
    "16",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--hidden",
    "32",
]
SIZES += ["--evaluation", "8", "--device", "cpu"]


def module(path):
    if not path.exists():
        pytest.skip(f"{path} is not there: the tests run outside of a clone")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a sentence that is said again and again, " * 50)
    return str(path)


@pytest.mark.parametrize("method", ["dense", "semi-sparse", "s-ste", "fst", "step"])
def test_every_method_learns(text, method):
    example = module(ROOT / "python/examples/gpt_pretrain.py")
    options = example.parser().parse_args([text, "--method", method, *SIZES, "--lr", "1e-2"])
    result = example.train(options, report=lambda line: None)
    assert result["held_out_loss"] < 0.9 * math.log(256) and result["seconds"] > 0
    options.context = 1 << 20
    with pytest.raises(ValueError, match="too few"):
        example.train(options)


def test_the_study_goes_on_where_it_was(text, tmp_path, monkeypatch, capsys):
    study = module(ROOT / "bench/studies/gpt_study.py")
    results = tmp_path / "results.json"

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["gpt_study.py", text, str(results), *SIZES, *options])
        study.main()
        return json.loads(results.read_text())["runs"]

    first = run("--seeds", "1", "--methods", "dense", "s-ste")
    assert [(r["method"], r["seed"]) for r in first] == [("dense", 0), ("s-ste", 0)]
    second = run("--seeds", "2", "--methods", "dense", "semi-sparse:")
    assert second[:2] == first
    assert [(r["method"], r["seed"]) for r in second[2:]] == [("semi-sparse:", 0), ("dense", 1), ("semi-sparse:", 1)]
    assert "to dense" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="other settings .lr."):
        run("--lr", "0.5")
