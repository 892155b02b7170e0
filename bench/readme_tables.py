"""Writes the README's tables from the raw results: `python3 bench/readme_tables.py` (add --check to only compare).

Reads every `bench/results/*/cpu.json` (made by `twofour bench cpu -o cpu.json`) and replaces what stands between the
markers `<!-- cpu-table -->` and `<!-- /cpu-table -->` of README.md; likewise `prune.json` (`twofour bench cuda --suite prune`) with
`prune-torch.json` (`bench/pytorch_prune.py`) beside it, and `prune-table`. With a file's name as the argument it prints that `cpu.json`'s table.
"""

import collections
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


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


def prune_table(path):
    result = json.loads(path.read_text())
    torch_path = path.with_name("prune-torch.json")
    torch = json.loads(torch_path.read_text()) if torch_path.exists() else {"rows": []}
    times = {tuple(r["shape"]): r["us"] for r in torch["rows"]}
    of = collections.OrderedDict()
    for row in result["rows"]:
        of.setdefault(tuple(row["shape"]), {})[row["dtype"], row["kernel"]] = row
    machine = result["machine"]
    heads = ["bf16, greedy", "bf16, optimal", "f32, greedy", "f32, optimal", "copy of as many bytes (bf16)", "torch, bf16, greedy", "torch / ours"]
    raw = path.relative_to(ROOT).as_posix()
    lines = [
        f"**{machine['gpu']}**, {machine['architecture']}, measured by `{result['command']}` ([raw]({raw})); torch {torch.get('torch', '-')} by "
        "`bench/pytorch_prune.py` on the same machine in the same minute.",
        "",
        "| weight | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
    ]
    for shape, rows in of.items():
        def cell(dtype, kernel):
            row = rows[dtype, kernel]
            return f"{row['us']:.1f} µs, {row['gb_per_s'] / 1e3:.2f} TB/s"
        cells = [cell("bf16", "greedy"), cell("bf16", "optimal"), cell("f32", "greedy"), cell("f32", "optimal")]
        cells.append(cell("bf16", "device to device"))
        theirs = times.get(shape)
        cells += [f"{theirs:.1f} µs", f"{theirs / rows['bf16', 'greedy']['us']:.2f}x"] if theirs else ["", ""]
        lines.append(f"| [{shape[0]}, {shape[1]}] | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


TABLES = {"cpu-table": ("cpu.json", table), "prune-table": ("prune.json", prune_table)}


def main():
    files = [argument for argument in sys.argv[1:] if argument != "--check"]
    if files:
        print("\n".join(table(pathlib.Path(file)) for file in files), end="")
        return
    readme = ROOT / "README.md"
    before = after = readme.read_text()
    for name, (file, make) in TABLES.items():
        marked = re.compile(f"(<!-- {name} -->\\n).*?(<!-- /{name} -->)", re.S)
        tables = "\n".join(make(p) for p in sorted(ROOT.glob(f"bench/results/*/{file}")))
        after, count = marked.subn(lambda m: m[1] + tables + m[2], after)
        if count != 1:
            sys.exit(f"README.md does not have exactly one pair of {name} markers")
    if "--check" in sys.argv:
        if before != after:
            sys.exit("README.md's tables are not what bench/results says; run python3 bench/readme_tables.py")
    else:
        readme.write_text(after)


main()
