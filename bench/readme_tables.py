"""Writes the README's tables from the raw results: `python3 bench/readme_tables.py` (add --check to only compare).

Replaces what stands between markers such as `<!-- cpu-table -->` and `<!-- /cpu-table -->` of README.md by tables of every result there is:
`bench/results/*/cpu.json` (made by `twofour bench cpu -o cpu.json`), and of GPUs `gemm.json`, `decode.json`, `train-linear.json`,
`overhead.json` and `prune.json` (`twofour bench cuda --suite ...`), the last with `prune-torch.json` (`bench/pytorch_prune.py`) beside it. With a
file's name as the argument it prints that `cpu.json`'s table.
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
    dense = [r for r in rows if not r["contender"].startswith("twofour 2:4")]
    if not ours or not dense:
        return ["", ""]
    best = min(dense, key=lambda r: r["median_us"])
    speed_up = best["median_us"] / ours["median_us"]
    shown = f"{speed_up:.2f}x ({best['contender']})"
    single = next((r for r in rows if r["contender"] == "twofour 2:4 f32"), None)
    if single:
        shown += f", {single['median_us'] / ours['median_us']:.2f}x over 2:4 f32"
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
        of.setdefault(tuple(row["shape"]), {})[row["dtype"], row["output"], row["kernel"]] = row
    machine = result["machine"]
    heads = ["bf16, greedy", "bf16, optimal", "f32, greedy", "f32, optimal", "bf16 to e4m3, greedy", "copy of as many bytes (bf16)"]
    heads += ["torch, bf16, greedy", "torch / ours"]
    raw = path.relative_to(ROOT).as_posix()
    lines = [
        f"**{machine['gpu']}**, {machine['architecture']}, measured by `{result['command']}` ([raw]({raw})); torch {torch.get('torch', '-')} by "
        "`bench/pytorch_prune.py` on the same machine in the same minute.",
        "",
        "| weight | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
    ]
    for shape, rows in of.items():
        def cell(dtype, kernel, output="bf16"):
            row = rows.get((dtype, output, kernel))
            return f"{row['us']:.1f} µs, {row['gb_per_s'] / 1e3:.2f} TB/s" if row else "-"
        cells = [cell("bf16", "greedy"), cell("bf16", "optimal"), cell("f32", "greedy"), cell("f32", "optimal")]
        cells += [cell("bf16", "greedy", "e4m3"), cell("bf16", "device to device")]
        theirs = times.get(shape)
        cells += [f"{theirs:.1f} µs", f"{theirs / rows['bf16', 'bf16', 'greedy']['us']:.2f}x"] if theirs else ["", ""]
        lines.append(f"| [{shape[0]}, {shape[1]}] | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def where(path, result):
    machine, raw = result["machine"], path.relative_to(ROOT).as_posix()
    libraries = result.get("libraries")
    beside = f"; cuBLASLt {libraries['cublaslt']}, cuSPARSELt {libraries['cusparselt']}" if libraries else ""
    return f"**{machine['gpu']}**, {machine['architecture']}, measured by `{result['command']}` ([raw]({raw})){beside}."


def micro(row):
    return f"{row['us']:.1f} µs"


def over(theirs, ours):
    return f"{theirs['us'] / ours['us']:.2f}x" if theirs else "-"


def by_contender(rows, key):
    of = collections.OrderedDict()
    for row in rows:
        of.setdefault(key(row), {})[row["contender"]] = row
    return of


def gemm_table(path):
    result = json.loads(path.read_text())
    lines = [
        where(path, result),
        "",
        "| tokens, reduction, features | dtype | dense: cuBLASLt | 2:4: cuSPARSELt | 2:4: twofour | over dense | over cuSPARSELt | without a pause: dense, cuSPARSELt, twofour |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (dtype, shape), rows in by_contender(result["rows"], lambda r: (r["dtype"], tuple(r["shape"]))).items():
        dense, theirs, ours = (rows.get(name) for name in ("cublaslt", "cusparselt", "twofour"))
        rate = lambda row: f"{micro(row)}, {row['tflops']:.0f} TF" if row else "-"
        sustained = [row["sustained_us"] for row in (dense, theirs, ours) if row and row["sustained_us"]]
        operations = 2 * shape[0] * shape[1] * shape[2]
        shown = ", ".join(f"{operations / us * 1e-6:.0f} TF" for us in sustained)
        cells = [rate(dense), rate(theirs), rate(ours), over(dense, ours), over(theirs, ours), shown]
        lines.append(f"| {', '.join(map(str, shape))} | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def decode_table(path):
    result = json.loads(path.read_text())
    of = by_contender(result["rows"], lambda r: (r["dtype"], tuple(r["shape"][:0:-1]), r["shape"][0]))
    tokens = sorted({key[2] for key in of})
    lines = [
        where(path, result),
        "",
        "Time of our kernel; over dense cuBLASLt, over cuSPARSELt (- where it has no kernel); and the time that merely reading the 2:4 weight takes.",
        "",
        "| weight | dtype | " + " | ".join(plural(t, "token") for t in tokens) + " | mere reading |",
        "|---|---|" + "---|" * (len(tokens) + 1),
    ]
    for dtype, shape in dict.fromkeys(key[:2] for key in of):
        cells = []
        for t in tokens:
            rows = of[dtype, shape, t]
            ours = rows["twofour"]
            cells.append(f"{micro(ours)}; {over(rows.get('cublaslt'), ours)}, {over(rows.get('cusparselt'), ours)}")
        cells.append(micro(of[dtype, shape, tokens[0]]["read"]))
        lines.append(f"| [{shape[0]}, {shape[1]}] | {dtype} | " + " | ".join(cells) + " |")
    int4 = {key: rows for key, rows in of.items() if "twofour-int4" in rows}
    if int4:
        lines += [
            "",
            "The same with the 2:4 weight in four bits, a scale for every 128 columns: time; over dense bf16 (cuBLASLt), over our bf16 2:4 kernel. And the time that merely reading the four-bit weight takes, over dense bf16 with one token: no product of one token gains more.",
            "",
            "| weight | " + " | ".join(plural(t, "token") for t in tokens) + " | mere reading |",
            "|---|" + "---|" * (len(tokens) + 1),
        ]
        for dtype, shape in dict.fromkeys(key[:2] for key in int4):
            rows = [int4[dtype, shape, t] for t in tokens]
            cells = [(r["twofour-int4"], r.get("cublaslt"), r["twofour"]) for r in rows]
            cells = [f"{micro(ours)}; {over(dense, ours)}, {over(wide, ours)}" for ours, dense, wide in cells]
            reading = rows[0]["read-int4"]
            cells.append(f"{micro(reading)}; {over(rows[0].get('cublaslt'), reading)}")
            lines.append(f"| [{shape[0]}, {shape[1]}] | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def train_table(path):
    result = json.loads(path.read_text())
    of = collections.OrderedDict()
    for row in result["rows"]:
        of.setdefault((row["dtype"], tuple(row["shape"])), {})[row["contender"], row["part"]] = row
    lines = [
        where(path, result),
        "",
        "| tokens, in, out | dtype | dense step | 2:4 step | speed-up | forward | input gradient | prune and compress | weight's gradient (dense) | step with MVUE | speed-up | weight's gradient (MVUE: estimate, product) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (dtype, shape), rows in of.items():
        dense, ours = rows["cublaslt", "all"], rows["twofour", "all"]
        both = lambda part: f"{micro(rows['cublaslt', part])} to {micro(rows['twofour', part])}"
        cells = [micro(dense), micro(ours), over(dense, ours), both("forward"), both("input gradient")]
        cells += [micro(rows["twofour", "prune and compress"]), micro(rows["cublaslt", "weight gradient"])]
        mvue = rows["twofour-mvue", "all"]
        estimate, product = rows["twofour-mvue", "estimate the output's gradient"], rows["twofour-mvue", "weight gradient"]
        cells += [micro(mvue), over(dense, mvue), f"{micro(estimate)}, {micro(product)}"]
        lines.append(f"| {', '.join(map(str, shape))} | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def overhead_table(path):
    result = json.loads(path.read_text())
    lines = [where(path, result), "", "| call | contender | host |", "|---|---|---|"]
    for row in result["rows"]:
        tokens = row["shape"][0]
        call = f"product with {plural(tokens, 'token')}" if tokens else "prune"
        lines.append(f"| {call} | {row['contender']}, {row['kernel']} | {row['host_us']:.1f} µs |")
    return "\n".join(lines) + "\n"


TABLES = {
    "cpu-table": ("cpu.json", table),
    "gemm-table": ("gemm.json", gemm_table),
    "decode-table": ("decode.json", decode_table),
    "train-table": ("train-linear.json", train_table),
    "overhead-table": ("overhead.json", overhead_table),
    "prune-table": ("prune.json", prune_table),
}


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
