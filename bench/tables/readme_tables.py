"""Writes the tables of README.md and docs/ from the raw results: `python3 bench/tables/readme_tables.py` (--check only
compares).

Replaces what stands between markers such as `<!-- cpu-table -->` and `<!-- /cpu-table -->`. `DOCUMENTS` says which
document has which tables and from which files of bench/results each is made. With a file's name as the argument it
prints that `cpu.json`'s table.
"""

import collections
import json
import os
import pathlib
import re
import sys

import accuracy_tables
import decoder_tables
import generate_tables
import image_tables
import grid_tables
import markdown
import python_tables
import real_model_tables
import strategy_tables
import threads_tables
import vision_tables

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The document that tables are made for: links are relative to its folder.
document = ROOT / "README.md"


def link(path):
    return pathlib.Path(os.path.relpath(path, document.parent)).as_posix()


def plural(count, noun):
    return f"{count} {noun}{'s' * (count != 1)}"


def cells(rows):
    """Speedup over the best dense baseline, its share of the bandwidth limit, and how much of the read bandwidth our
    dense kernel reaches.
    """
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
    read = "; ".join(
        f"{b['gb_per_s']:.1f} GB/s with {plural(b['threads'], 'thread')}" for b in result["read_bandwidth"]
    )
    machine, place = result["machine"], path.resolve()
    raw = f" ([raw]({link(place)}))" if place.is_relative_to(ROOT) else ""
    heads = [h for t in threads for h in (plural(t, "thread"), "dense: share of read bandwidth")]
    text = f"**{machine['cpu']}**, engine {machine['engine']}, measured by `{result['command']}`{raw}"
    body = []
    for (work, dtype, shape, tokens), by_threads in groups.items():
        limits = [r["byte_limit"] for rows in by_threads.values() for r in rows if work == "decode"]
        limit = f"{limits[0]:.2f}x" if limits else ""
        shown = [cell for t in threads for cell in cells(by_threads.get(t, []))]
        name = f"{work} {dtype}, {plural(tokens, 'token')}, [{shape[0]}, {shape[1]}]"
        body.append([name, limit, *shown])
    return markdown.under(f"{text}; read bandwidth: {read}.", ["work", "bandwidth limit", *heads], body)


def prune_table(path):
    result = json.loads(path.read_text())
    torch_path = path.with_name("prune-torch.json")
    torch = json.loads(torch_path.read_text()) if torch_path.exists() else {"rows": []}
    times = {tuple(r["shape"]): r["us"] for r in torch["rows"]}
    of = collections.OrderedDict()
    for row in result["rows"]:
        of.setdefault(tuple(row["shape"]), {})[row["dtype"], row["output"], row["kernel"]] = row
    machine = result["machine"]
    heads = ["weight", "bf16, greedy", "bf16, optimal", "f32, greedy", "f32, optimal", "bf16 to e4m3, greedy"]
    heads += ["copy of as many bytes (bf16)", "torch, bf16, greedy", "torch / ours"]
    text = (
        f"**{machine['gpu']}**, {machine['architecture']}, measured by `{result['command']}` ([raw]({link(path)}));"
        f" torch {torch.get('torch', '-')} by `bench/peers/pytorch_prune.py` on the same machine in the same minute."
    )
    body = []
    for shape, rows in of.items():

        def cell(dtype, kernel, output="bf16"):
            row = rows.get((dtype, output, kernel))
            return f"{row['us']:.1f} µs, {row['gb_per_s'] / 1e3:.2f} TB/s" if row else "-"

        cells = [cell("bf16", "greedy"), cell("bf16", "optimal"), cell("f32", "greedy"), cell("f32", "optimal")]
        cells += [cell("bf16", "greedy", "e4m3"), cell("bf16", "device to device")]
        theirs = times.get(shape)
        cells += [f"{theirs:.1f} µs", f"{theirs / rows['bf16', 'bf16', 'greedy']['us']:.2f}x"] if theirs else ["", ""]
        body.append([list(shape), *cells])
    return markdown.under(text, heads, body)


def where(path, result):
    machine, raw = result["machine"], link(path)
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
    body = []
    for (dtype, shape), rows in by_contender(result["rows"], lambda r: (r["dtype"], tuple(r["shape"]))).items():
        dense, theirs, ours = (rows.get(name) for name in ("cublaslt", "cusparselt", "twofour"))
        rate = lambda row: f"{micro(row)}, {row['tflops']:.0f} TF" if row else "-"
        sustained = [row["sustained_us"] for row in (dense, theirs, ours) if row and row["sustained_us"]]
        operations = 2 * shape[0] * shape[1] * shape[2]
        shown = ", ".join(f"{operations / us * 1e-6:.0f} TF" for us in sustained)
        cells = [rate(dense), rate(theirs), rate(ours), over(dense, ours), over(theirs, ours), shown]
        body.append([", ".join(map(str, shape)), dtype, *cells])
    heads = ["tokens, in, out", *GEMM_HEADS, "sustained: dense, cuSPARSELt, twofour"]
    return markdown.under(where(path, result), heads, body)


#: What tables of GEMMs say of each.
GEMM_HEADS = ["dtype", "dense: cuBLASLt", "2:4: cuSPARSELt", "2:4: twofour", "speedup over dense", "over cuSPARSELt"]


def decode_table(path):
    result = json.loads(path.read_text())
    of = by_contender(result["rows"], lambda r: (r["dtype"], tuple(r["shape"][:0:-1]), r["shape"][0]))
    tokens = sorted({key[2] for key in of})
    text = (
        "Time of our kernel; speedup over dense cuBLASLt, over cuSPARSELt (- where it has no kernel). Last column:"
        " the time to read the 2:4 weight once, the bandwidth limit."
    )
    heads, body = [*(plural(t, "token") for t in tokens), "reading the weight"], []
    for dtype, shape in dict.fromkeys(key[:2] for key in of):
        cells = []
        for t in tokens:
            rows = of[dtype, shape, t]
            ours = rows["twofour"]
            cells.append(f"{micro(ours)}; {over(rows.get('cublaslt'), ours)}, {over(rows.get('cusparselt'), ours)}")
        cells.append(micro(of[dtype, shape, tokens[0]]["read"]))
        body.append([list(shape), dtype, *cells])
    made = where(path, result) + "\n\n" + markdown.under(text, ["weight", "dtype", *heads], body)
    int4 = {key: rows for key, rows in of.items() if "twofour-int4" in rows}
    if int4:
        text = (
            "Int4 2:4 weights with groups of 128: time of our kernel; speedup over dense bf16 (cuBLASLt), over our"
            " bf16 2:4 kernel. Last column: the time to read the int4 weight once, and the speedup over dense bf16"
            " at one token that a GEMM as fast as that would have."
        )
        body = []
        for dtype, shape in dict.fromkeys(key[:2] for key in int4):
            rows = [int4[dtype, shape, t] for t in tokens]
            cells = [(r["twofour-int4"], r.get("cublaslt"), r["twofour"]) for r in rows]
            cells = [f"{micro(ours)}; {over(dense, ours)}, {over(wide, ours)}" for ours, dense, wide in cells]
            reading = rows[0]["read-int4"]
            cells.append(f"{micro(reading)}; {over(rows[0].get('cublaslt'), reading)}")
            body.append([list(shape), *cells])
        made += "\n" + markdown.under(text, ["weight", *heads], body)
    return made


def layer_table(path):
    result = json.loads(path.read_text())
    of = collections.OrderedDict()
    for row in result["rows"]:
        of.setdefault((row["dtype"], tuple(row["shape"])), {})[row["contender"], row["part"]] = row
    heads = ["tokens, in, out", "dtype", "dense step", "2:4 step", "speedup", "mask and packing", "forward"]
    heads += ["input gradient", "weight and bias gradients"]
    heads += ["step with MVUE", "speedup", "weight and bias gradients (MVUE)"]
    body = []
    for (dtype, shape), rows in of.items():
        dense, ours, mvue = (rows[contender, "all"] for contender in ("cublaslt", "twofour", "twofour-mvue"))
        both = lambda part: f"{micro(rows['cublaslt', part])} to {micro(rows['twofour', part])}"
        gradients = "weight and bias gradients"
        cells = [micro(dense), micro(ours), over(dense, ours), micro(rows["twofour", "mask and packing"])]
        cells += [both("forward"), both("input gradient"), both(gradients)]
        cells += [micro(mvue), over(dense, mvue), micro(rows["twofour-mvue", gradients])]
        body.append([", ".join(map(str, shape)), dtype, *cells])
    return markdown.under(where(path, result), heads, body)


def attention_table(path):
    result = json.loads(path.read_text())
    torch = json.loads((path.parent / "attention-torch.json").read_text())
    key = lambda row: (tuple(row["shape"]), row["causal"])
    # Of each engine the fastest run, and the smaller of both passes together, where autograd may keep the device
    # waiting, and of their sum.
    parts = {}
    for row in torch["rows"]:
        us = parts.setdefault((key(row), row["contender"]), {})
        us[row["part"]] = min(row["us"], us.get(row["part"], row["us"]))
    best = {}
    for (shape, engine), us in parts.items():
        row = {"us": min(us["both"], us["forward"] + us["backward"]), "contender": engine}
        if shape not in best or row["us"] < best[shape]["us"]:
            best[shape] = row
    ours = collections.OrderedDict()
    for row in result["rows"]:
        if row["contender"] == "fused":
            ours.setdefault(key(row), {})[row["part"]] = row
    peer = f"torch {torch['torch']}, cuDNN {torch['cudnn']}"
    text = (
        f"{where(path, result)}\nContender: the fastest engine of `scaled_dot_product_attention` ({peer};"
        f" [raw]({link(path.with_name('attention-torch.json'))}))."
    )
    body = []
    for (shape, causal), rows in ours.items():
        batch, positions, heads, head_dim = shape
        other = best[shape, causal]
        cells = [f"{batch} x {positions}", f"{heads} of {head_dim}", "causal" if causal else "full"]
        cells += [
            f"{micro(rows[part])}, {rows[part]['tflops']:.0f} TFLOP/s" for part in ("forward", "backward", "both")
        ]
        cells += [f"{micro(other)} ({other['contender']})", over(other, rows["both"])]
        body.append(cells)
    heads = ["tokens", "heads", "mask", "forward", "backward", "both", "torch's best, both", "of its speed"]
    return markdown.under(text, heads, body)


def compiled_step(path, row):
    """torch.compile's milliseconds for a ViT's row, dense, from `bench/python/vit_step.py`'s record beside it; None
    without one.
    """
    beside = path.parent / "python-vit_step.json"
    if row.get("kind") != "vit" or row["model"][0] != 24 or not beside.exists():
        return None
    of = json.loads(beside.read_text())["results"].get(f"ViT-L, {row['batch']}x{row['model'][3]}")
    return of and of["dense"]["ms"]


def step_table(path):
    result = json.loads(path.read_text())
    has_images = any(row.get("kind") == "vit" for row in result["rows"])
    heads = ["model" if has_images else "layers", "feed-forward blocks", "step", "90th percentile", "without a graph"]
    heads += ["tokens/s", "over dense"]
    heads += ["of torch.compile's dense step"] * has_images + ["forward", "backward", "optimizer", "masks", "memory"]
    body = []
    for row in result["rows"]:
        kind, (layers, _, _, tokens, _) = row.get("kind", "gpt"), row["model"]
        dense = next(
            r
            for r in result["rows"]
            if (r.get("kind", "gpt"), r["model"]) == (kind, row["model"]) and r["contender"] == "dense"
        )
        phases = {phase["phase"]: phase["ms"] for phase in row["phases"]}
        model = (
            f"{'ViT' if kind == 'vit' else 'GPT'}, {plural(layers, 'layer')}, {row['batch']} x {tokens}"
            if has_images
            else str(layers)
        )
        cells = [model, row["contender"], *(f"{row[key]:.2f} ms" for key in ("ms", "p90_ms", "launched_ms"))]
        cells += [f"{row['tokens_per_s']:,.0f}", f"{dense['ms'] / row['ms']:.3f}x"]
        if has_images:
            compiled = compiled_step(path, row)
            cells.append(f"{row['ms'] / compiled:.3f} ({compiled:.2f} ms)" if compiled else "-")
        cells += [f"{phases[phase]:.2f} ms" for phase in ("forward", "backward", "update", "masks")]
        body.append([*cells, f"{row.get('allocated_bytes', row['bytes']) / 1e9:.2f} GB"])
    return markdown.under(where(path, result), heads, body)


# Rows of the short CPU table: work, dtype, tokens, [out, in].
CPU_ROWS = [
    ("decode", "f32", 1, (14336, 4096)),
    ("decode", "bf16", 1, (14336, 4096)),
    ("decode", "i8", 1, (14336, 4096)),
    ("decode", "f32", 16, (4096, 14336)),
    ("decode", "bf16", 16, (4096, 14336)),
    ("prefill", "f32", 512, (4096, 4096)),
    ("prefill", "bf16", 512, (4096, 4096)),
    ("prefill", "i8", 512, (4096, 4096)),
]

# What a machine's results are called by the name of their folder.
CPU_NAMES = {
    "emerald-rapids": "Intel Xeon (Emerald Rapids), AMX",
    "epyc-zen3-2c": "AMD EPYC (Zen 3), AVX2",
    "epyc-zen5-2c": "AMD EPYC (Zen 5), AVX-512",
}

# Rows of the short GPU table: tokens, in, out, dtype.
GPU_ROWS = [
    (1, 4096, 28672, "bf16"),
    (16, 14336, 4096, "bf16"),
    (64, 4096, 6144, "bf16"),
    (1, 4096, 28672, "int4"),
    (4096, 4096, 14336, "bf16"),
    (4096, 14336, 4096, "bf16"),
    (4096, 4096, 14336, "e4m3"),
    (4096, 14336, 4096, "i8"),
]


def short_cpu_table(_):
    machines = [(p.parent.name, json.loads(p.read_text())) for p in sorted(ROOT.glob("bench/results/*/cpu.json"))]
    names = [CPU_NAMES.get(name, name) for name, _ in machines]
    body = []
    for work, dtype, tokens, shape in CPU_ROWS:
        shown, limit = [], ""
        for _, result in machines:
            rows = [
                r
                for r in result["rows"]
                if (r["work"], r["dtype"], r["tokens"], tuple(r["shape"])) == (work, dtype, tokens, shape)
            ]
            rows = [r for r in rows if r["threads"] == max(r["threads"] for r in rows)]
            shown.append(cells(rows)[0].split(" (")[0].split(",")[0])
            if work == "decode" and rows and tokens == 1:
                limit = f"{rows[0]['byte_limit']:.2f}x"
        body.append([f"{work} {dtype}, {plural(tokens, 'token')}", list(shape), limit, *shown])
    return markdown.rows(["GEMM", "weight [out, in]", "bandwidth limit", *names], body)


def gpu_row(tokens, inputs, out, dtype):
    """The file, its content and the rows (dense, cuSPARSELt's or None, ours) of a GEMM, from the first of the H200's
    files that has it.
    """
    folder = ROOT / "bench/results/h200"
    wanted, name = ("bf16", "twofour-int4") if dtype == "int4" else (dtype, "twofour")
    for path in (folder / file for file in ("grid.json", "gemm.json", "decode.json")):
        if path.exists():
            result = json.loads(path.read_text())
            rows = {
                r["contender"]: r
                for r in result["rows"]
                if r["dtype"] == wanted and r["shape"] == [tokens, inputs, out]
            }
            if name in rows and "cublaslt" in rows:
                return path, result, rows["cublaslt"], None if dtype == "int4" else rows.get("cusparselt"), rows[name]
    sys.exit(f"no result has {name} and cublaslt for {tokens} tokens, in {inputs}, out {out}, {wanted}")


def short_gpu_table(_):
    used, body = [], []
    for tokens, inputs, out, dtype in GPU_ROWS:
        path, result, dense, theirs, ours = gpu_row(tokens, inputs, out, dtype)
        used.append((path, result))
        shown = [micro(dense), micro(theirs) if theirs else "-", micro(ours), over(dense, ours), over(theirs, ours)]
        name = "int4, against dense bf16" if dtype == "int4" else dtype
        body.append([tokens, [out, inputs], name, *shown])
    machine = used[0][1]["machine"]
    sources = ", ".join(f"[{path.name}]({link(path)})" for path in dict.fromkeys(path for path, _ in used))
    libraries = used[0][1]["libraries"]
    heat_map = ROOT / "docs/grid-h200.svg"
    text = (
        f"**{machine['gpu']}**, device time, median ({sources}); cuBLASLt {libraries['cublaslt']}, cuSPARSELt"
        f" {libraries['cusparselt']}."
    )
    return picture(heat_map) + markdown.under(text, ["tokens", "weight [out, in]", *GEMM_HEADS], body)


def picture(heat_map):
    """A link to a heat map, where it was drawn."""
    what = "Heat map of the speedup over dense and over cuSPARSELt, by layer and number of tokens"
    return f"![{what}]({link(heat_map)})\n\n" if heat_map.exists() else ""


# Rows of the README's table of speed: of the CPU's, the machine's folder, work, dtype, tokens, [out, in]; of the GPU's
# as above.
SPEED_CPU = (
    "epyc-zen5-2c",
    [
        ("decode", "f32", 1, (14336, 4096)),
        ("decode", "bf16", 1, (14336, 4096)),
        ("prefill", "f32", 512, (4096, 4096)),
        ("prefill", "bf16", 512, (4096, 4096)),
    ],
)
# What results call a type of weights, where readers have another name.
WEIGHTS = {"i8": "int8", "int4": "int4 (dense: bf16)"}
SPEED_GPU = [(1, 4096, 28672, "bf16"), (1, 4096, 28672, "int4"), (4096, 14336, 4096, "bf16"), (4096, 14336, 4096, "i8")]


def speed_table(_):
    """A CPU and a GPU, a few GEMMs each: the fastest dense baseline beside ours."""
    folder, wanted = SPEED_CPU
    path = ROOT / "bench/results" / folder / "cpu.json"
    result = json.loads(path.read_text())
    threads = max(row["threads"] for row in result["rows"])
    where = f"[{CPU_NAMES[folder]}]({link(path)}), {plural(threads, 'thread')}"
    body = []
    for work, dtype, tokens, shape in wanted:
        key = (work, dtype, tokens, shape, threads)
        rows = [
            r for r in result["rows"] if (r["work"], r["dtype"], r["tokens"], tuple(r["shape"]), r["threads"]) == key
        ]
        ours = next(r["median_us"] for r in rows if r["contender"] == "twofour 2:4")
        dense = min(r["median_us"] for r in rows if not r["contender"].startswith("twofour 2:4"))
        shown = [f"{dense / 1e3:.1f} ms", f"{ours / 1e3:.1f} ms", f"{dense / ours:.2f}x"]
        body.append([where, f"{WEIGHTS.get(dtype, dtype)}, {plural(tokens, 'token')}", list(shape), *shown])
        where = ""
    for tokens, inputs, out, dtype in SPEED_GPU:
        path, result, dense, _, ours = gpu_row(tokens, inputs, out, dtype)
        machine = (
            f"[{result['machine']['gpu']}]({link(path.parent)})" if (tokens, inputs, out, dtype) == SPEED_GPU[0] else ""
        )
        name = f"{WEIGHTS.get(dtype, dtype)}, {plural(tokens, 'token')}"
        body.append([machine, name, [out, inputs], micro(dense), micro(ours), over(dense, ours)])
    return markdown.rows(["machine", "GEMM", "weight [out, in]", "dense, the fastest", "2:4", "speedup"], body)


def grid_table(path):
    result = json.loads(path.read_text())
    heat_map = picture(ROOT / f"docs/grid-{path.parent.name}.svg")
    return f"{where(path, result)}\n\n{heat_map}" + "\n".join(grid_tables.grid_lines(result)) + "\n"


def epilogue_grid_table(path):
    result = json.loads(path.read_text())
    title = {"bias": "A bias", "bias-gelu": "A bias and GELU", "scales": "Scales and a bias"}[result["epilogue"]]
    return "\n".join([f"{title}: {where(path, result)}", ""] + grid_tables.summary_lines(result)) + "\n"


# Documents with their tables: a marker, the files that it is made from (one table each; none: one table of everything),
# and how.
DOCUMENTS = {
    "README.md": {
        "speed-table": (None, speed_table),
        "short-accuracy-table": (
            None,
            lambda _: real_model_tables.short_table(REAL_MODELS, "qwen2.5-coder-0.5b-instruct"),
        ),
    },
    "docs/reference/benchmarks.md": {
        "short-cpu-table": (None, short_cpu_table),
        "short-gpu-table": (None, short_gpu_table),
        "cpu-table": ("cpu.json", table),
        "cpu-generate-table": ("cpu-generate-*.json", lambda path: generate_tables.table(path, link(path))),
        # A table for a folder: a machine has a file for each number of threads.
        "threads-generate-table": (
            "threads-generate-1.json",
            lambda path: threads_tables.generation(path.parent, link),
        ),
        "grid-table": ("grid.json", grid_table),
        "grid-epilogue-table": ("grid-epilogue-*.json", epilogue_grid_table),
        "gemm-table": ("gemm.json", gemm_table),
        "decode-table": ("decode.json", decode_table),
        "gpu-generate-table": ("generate*.json", lambda path: generate_tables.gpu_table(path, link(path))),
        "image-table": ("encoder-sam-*.json", lambda path: image_tables.table(path, link(path))),
        "layer-table": ("layer*.json", layer_table),
        "attention-table": ("attention.json", attention_table),
        "step-table": ("step*.json", step_table),
        "prune-table": ("prune.json", prune_table),
    },
    "docs/how-to/strategies.md": {
        "strategies-table": ("strategies-*.json", lambda path: strategy_tables.table(path, link(path))),
    },
    "docs/reference/pytorch-benchmarks.md": {
        "python-host-table": ("python-host.json", python_tables.tables(python_tables.host_table)),
        "python-linear-table": ("python-linear.json", python_tables.tables(python_tables.linear_table)),
        "python-threads-table": ("python-threads.json", lambda path: threads_tables.linear(path, link(path))),
        "python-int4-table": ("python-int4.json", python_tables.tables(python_tables.int4_table)),
        "python-transformers-table": (
            "python-models.json",
            python_tables.tables(python_tables.transformers_table),
        ),
        "python-model-table": ("python-vit_step.json", python_tables.tables(python_tables.model_table)),
        "python-parallel-table": ("python-distributed.json", python_tables.tables(python_tables.parallel_table)),
        "python-study-table": ("python-gpt_study.json", python_tables.tables(python_tables.study_table)),
    },
    "docs/explanation/accuracy.md": {
        "accuracy-table": ("accuracy/dense-0.json", lambda path: accuracy_tables.table(path.parent)),
        "vision-table": ("vision/dense-0.json", lambda path: vision_tables.table(path.parent)),
        "decoder-table": ("decoder-study.json", decoder_tables.table),
        "real-models-table": ("real-models.json", lambda path: real_model_tables.table(path, link(path))),
    },
}

REAL_MODELS = ROOT / "bench/results/accuracy/real-models.json"

# Pictures and how they are drawn.
PICTURES = {
    "docs/accuracy-h200.svg": lambda: accuracy_tables.picture(ROOT / "bench/results/h200/accuracy"),
    "docs/real-models.svg": lambda: real_model_tables.picture(REAL_MODELS),
}


def main():
    global document
    files = [argument for argument in sys.argv[1:] if argument != "--check"]
    if files:
        print("\n".join(table(pathlib.Path(file)) for file in files), end="")
        return
    for name, tables in DOCUMENTS.items():
        document = ROOT / name
        before = after = document.read_text()
        for marker, (file, make) in tables.items():
            marked = re.compile(f"(<!-- {marker} -->\\n).*?(<!-- /{marker} -->)", re.S)
            paths = sorted(ROOT.glob(f"bench/results/*/{file}")) if file else [None]
            made = "\n".join(make(path) for path in paths) or "No run has been recorded yet.\n"
            after, count = marked.subn(lambda m: m[1] + made + m[2], after)
            if count != 1:
                sys.exit(f"{name} does not have exactly one pair of {marker} markers")
        if "--check" not in sys.argv:
            document.write_text(after)
        elif before != after:
            sys.exit(f"the tables of {name} are not what bench/results says; run python3 bench/tables/readme_tables.py")
    for name, draw in PICTURES.items():
        drawn, path = draw(), ROOT / name
        if "--check" not in sys.argv:
            path.write_text(drawn)
        elif not path.exists() or path.read_text() != drawn:
            sys.exit(f"{name} is not what bench/results says; run python3 bench/tables/readme_tables.py")


if __name__ == "__main__":
    main()
