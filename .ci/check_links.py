"""Checks that every relative link and anchor of the repository's Markdown leads somewhere: `check_links.py [FILE...]`.

Without arguments it checks all Markdown files that git knows, and that docs/SUMMARY.md and docs/README.md list every
page of docs/. Links to other hosts are not followed.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(
    r"\]\(\s*([^)\s]+)(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)|\b(?:src|href)=\"([^\"]+)\"", re.MULTILINE
)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
NAMED = re.compile(r"<[^>]*\b(?:id|name)=\"([^\"]+)\"")


def slug(heading):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def anchors(path):
    text = FENCE.sub("", path.read_text())
    found, seen = set(NAMED.findall(text)), {}
    for heading in HEADING.findall(text):
        name = slug(heading)
        count = seen.get(name, 0)
        seen[name] = count + 1
        found.add(f"{name}-{count}" if count else name)
    return found


def links(path):
    """The targets of the links of a document, with their lines."""
    # Code is blanked out and not removed, so that lines keep their numbers.
    blank = lambda found: re.sub(r"[^\n]", " ", found[0])
    text = CODE.sub(blank, FENCE.sub(blank, path.read_text()))
    for found in LINK.finditer(text):
        yield next(group for group in found.groups() if group), text.count("\n", 0, found.start()) + 1


def problems(path):
    for target, line in links(path):
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists():
            yield f"{path.relative_to(ROOT)}:{line}: {target}: there is no such file"
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
            yield f"{path.relative_to(ROOT)}:{line}: {target}: no heading has this anchor"


def git_files(pattern):
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout
    return [name for name in names.split("\0") if name]


def unlisted(contents, pages):
    """Yields the pages that a table of contents has no link to."""
    listed = {(contents.parent / target.partition("#")[0]).resolve() for target, _ in links(contents)}
    for page in pages:
        if page not in listed:
            yield f"{contents.relative_to(ROOT)}: no link to {page.relative_to(ROOT)}"


def main():
    names = sys.argv[1:] or git_files("*.md")
    paths = [path for path in ((ROOT / name).resolve() for name in names) if path.exists()]
    found = [problem for path in paths for problem in problems(path)]
    if not sys.argv[1:]:
        summary, index = ROOT / "docs/SUMMARY.md", ROOT / "docs/README.md"
        pages = [path for path in paths if ROOT / "docs" in path.parents and path != summary]
        found += unlisted(summary, pages)
        found += unlisted(index, [page for page in pages if page != index])
    print("\n".join(found + [f"{len(paths)} documents, {len(found)} faults"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
