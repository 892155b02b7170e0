"""Writes the text of Debian's documentation packages, for recovering pruned models on:

    python3 bench/studies/documentation_text.py FOLDER

FOLDER/debian.txt has 10 MB of paragraphs of more than 200 characters, in the order of their digests, out of the HTML
and text files of the packages below. `apt-get download` fetches them, which requires Debian 12 or its package lists;
nothing is installed. The packages, their versions and the sha256 of the text are printed.
"""

import argparse
import gzip
import hashlib
import html.parser
import pathlib
import re
import subprocess
import sys
import tempfile

PACKAGES = (
    "anarchism debian-faq debian-handbook debian-policy debian-reference-en developers-reference fortunes git-doc "
    "harden-doc linux-doc-6.1 maint-guide postgresql-doc-15 python3.11-doc"
).split()
SHORTEST, BYTES = 200, 10_000_000
#: Files that hold text, as they are named or compressed.
NAMES = re.compile(r"\.(html?|txt|gz|rst|md)$|/fortunes/[a-z-]+$")
HTML = re.compile(r"\.html?(\.gz)?$")


class Paragraphs(html.parser.HTMLParser):
    """The text of a page, with empty lines between its blocks."""

    HIDDEN = {"script", "style", "title"}
    BLOCKS = {"p", "div", "li", "pre", "h1", "h2", "h3", "td", "dd", "dt"}

    def __init__(self):
        super().__init__()
        self.parts, self.hidden = [], 0

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.parts.append("\n\n")
        elif tag == "br":
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.hidden -= tag in self.HIDDEN and self.hidden > 0
        if tag in self.BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data)


def text_of(path):
    """The text of a file, or None where it is none."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    if not HTML.search(path.name):
        return text
    page = Paragraphs()
    page.feed(text)
    page.close()
    return "".join(page.parts)


def paragraphs(folder):
    """The long paragraphs of all files in a folder."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file() or not NAMES.search(str(path)):
            continue
        for paragraph in re.split(r"\n\s*\n", text_of(path) or ""):
            paragraph = re.sub(r"[ \t]+", " ", paragraph).strip()
            if len(paragraph) > SHORTEST:
                yield paragraph


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    found = set()
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        downloads = pathlib.Path(downloads)
        for package in PACKAGES:
            if subprocess.run(["apt-get", "download", package], cwd=downloads, stdout=subprocess.DEVNULL).returncode:
                print(f"{package}: apt-get has no such package; nothing was written", file=sys.stderr)
                return 1
            archive = next(downloads.glob(f"{package}_*.deb"))
            print(archive.name)
            subprocess.run(["dpkg-deb", "-x", archive, downloads / package], check=True)
            found.update(paragraphs(downloads / package))
    chosen, size = [], 0
    for paragraph in sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest()):
        chosen.append(paragraph)
        size += len(paragraph.encode()) + 2
        if size > BYTES:
            break
    path = folder / "debian.txt"
    path.write_text("\n\n".join(chosen))
    print(f"{path}: {path.stat().st_size} bytes, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
