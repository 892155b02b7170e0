"""The Python blocks of the documents run, in their order, each document in a namespace of its own."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document):
    """The Python blocks of a document, with the line at which each begins."""
    text = document.read_text()
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in BLOCK.finditer(text)]


def test_blocks_are_found_with_their_lines(tmp_path):
    document = tmp_path / "some.md"
    document.write_text("text\n```python\na = 1\nb = 2\n```\n```sh\nfalse\n```\n```python\nassert a\n```\n")
    assert blocks(document) == [(2, "a = 1\nb = 2\n"), (9, "assert a\n")]


@pytest.mark.parametrize(
    ("name", "least"), [
        ("docs/how-to/pytorch.md", 8),
        ("docs/how-to/moving.md", 1),
        ("docs/explanation/masks.md", 1),
        ("docs/reference/pytorch.md", 1),
        ("docs/reference/stores.md", 1),
        ("README.md", 1),
    ]
)
def test_python_in_documents_runs(name, least, tmp_path, monkeypatch):
    document = ROOT / name
    if not document.exists():
        pytest.skip(f"{document} is not there: the tests run outside of a clone")
    found = blocks(document)
    assert len(found) >= least
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "import transformers" in document.read_text():
        pytest.importorskip("transformers")
    namespace = {"__name__": name}
    for line, source in found:
        # Blank lines in front, so that an error names the document's line.
        exec(compile("\n" * line + source, str(document), "exec"), namespace)
