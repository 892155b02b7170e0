"""Writes the README's CPU table from the raw results: `python3 bench/readme_tables.py` (add --check to only compare).

Reads every `bench/results/*/cpu.json` (made by `twofour bench cpu -o cpu.json`) and replaces what stands between the
markers `<!-- cpu-table -->` and `<!-- /cpu-table -->` of README.md. With a file's name as the argument it prints that file's table.
"""

import collections
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- cpu-table -->\n).*?(<!-- /cpu-table -->)", re.S)


def plural(count, noun):
    return f"{count} {noun}{'s' * (count != 1)}"


def cells(rows):
    """Speed-up over the best dense contender, its share of the byte limit, and how much of the read bandwidth our dense kernel reaches."""
    ours = next((r for r in rows if r["contender"] == "twofour 2:4"), None)
    dense = [r for r in rows if r["contender"] != "twofour 2:4"]
    if not ours or not dense:
        return ["", ""]
    best = min(dense, key=lambda r: r["median_us"])
    speed_up = best["median_us"] / ours["median_us"]
    shown = f"{speed_up:.2f}x ({best['contender']})"
    read = next((r.get("read_share") for r in dense if r["contender"] == "twofour dense"), None)
    if ours["work"] == "decode":
        shown = f"{speed_up:.2f}x, {100 * speed_up / ours['byte_limit']:.0f} % of limit ({best['contender']})"
    return [shown, "" if read is None else f"{100 * read:.0f} %"]


def table(path):
    result = json.loads(path.read_text())
    groups = collections.OrderedDict()
    for row in result["rows"]:
        key = (row["work"], row["dtype"], tuple(row["shape"]), row["tokens"])
        groups.setdefault(key, {}).setdefault(row["threads"], []).append(row)
    threads = sorted({row["threads"] for row in result["rows"]})
    read = "; ".join(f"{b['gb_per_s']:.1f} GB/s with {plural(b['threads'], 'thread')}" for b in result["read_bandwidth"])
    machine, place = result["machine"], path.resolve()
    raw = f" ([raw]({place.relative_to(ROOT).as_posix()}))" if place.is_relative_to(ROOT) else ""
    heads = [h for t in threads for h in (plural(t, "thread"), "dense reads")]
    lines = [
        f"**{machine['cpu']}**, engine {machine['engine']}, measured by `{result['command']}`{raw}; mere reading: {read}.",
        "",
        "| work | byte limit | " + " | ".join(heads) + " |",
        "|---|---|" + "---|" * len(heads),
    ]
    for (work, dtype, shape, tokens), by_threads in groups.items():
        limits = [r["byte_limit"] for rows in by_threads.values() for r in rows if work == "decode"]
        limit = f"{limits[0]:.2f}x" if limits else ""
        shown = [cell for t in threads for cell in cells(by_threads.get(t, []))]
        name = f"{work} {dtype}, {plural(tokens, 'token')}, [{shape[0]}, {shape[1]}]"
        lines.append(f"| {name} | {limit} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main():
    files = [argument for argument in sys.argv[1:] if argument != "--check"]
    if files:
        print("\n".join(table(pathlib.Path(file)) for file in files), end="")
        return
    readme = ROOT / "README.md"
    before = readme.read_text()
    tables = "\n".join(table(p) for p in sorted(ROOT.glob("bench/results/*/cpu.json")))
    after, count = MARKED.subn(lambda m: m[1] + tables + m[2], before)
    if count != 1:
        sys.exit("README.md does not have exactly one pair of cpu-table markers")
    if "--check" in sys.argv:
        if before != after:
            sys.exit("README.md's CPU table is not what bench/results says; run python3 bench/readme_tables.py")
    else:
        readme.write_text(after)


main()
