"""Writes the README's CPU table from the raw results: `python3 bench/readme_tables.py` (add --check to only compare).

Reads every `bench/results/*/cpu.json` (made by `twofour bench cpu --json`) and replaces what stands between the
markers `<!-- cpu-table -->` and `<!-- /cpu-table -->` of README.md.
"""

import collections
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- cpu-table -->\n).*?(<!-- /cpu-table -->)", re.S)


def table(path):
    result = json.loads(path.read_text())
    machine = result["machine"]
    groups = collections.OrderedDict()
    for row in result["rows"]:
        key = (row["work"], row["dtype"], tuple(row["shape"]), row["tokens"])
        groups.setdefault(key, {}).setdefault(row["threads"], []).append(row)
    threads = sorted({row["threads"] for row in result["rows"]})
    lines = [
        f"**{machine['cpu']}**, measured by `{result['command']}` ([raw]({path.relative_to(ROOT).as_posix()})):",
        "",
        "| work | " + " | ".join(f"{t} thread{'s' * (t > 1)}" for t in threads) + " | byte limit |",
        "|---|" + "---|" * (len(threads) + 1),
    ]
    for (work, dtype, shape, tokens), by_threads in groups.items():
        cells, limit = [], ""
        for t in threads:
            rows = by_threads.get(t, [])
            ours = [r for r in rows if r["contender"] == "twofour 2:4"]
            dense = [r for r in rows if r["contender"] != "twofour 2:4"]
            if not ours or not dense:
                cells.append("")
                continue
            best = min(dense, key=lambda r: r["median_us"])
            cells.append(f"{best['median_us'] / ours[0]['median_us']:.2f}x ({best['contender']})")
            if work == "decode" and ours[0].get("byte_limit"):
                limit = f"{ours[0]['byte_limit']:.2f}x"
        lines.append(f"| {work} {dtype}, {tokens} token{'s' * (tokens > 1)}, [{shape[0]}, {shape[1]}] | " + " | ".join(cells) + f" | {limit} |")
    return "\n".join(lines) + "\n"


def main():
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
