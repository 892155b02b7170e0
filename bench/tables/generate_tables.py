"""The tables of whole-model generation: on a CPU from `bench/results/*/cpu-generate-*.json`, what `twofour-bench
generate -o` writes, and on a GPU from `bench/results/*/generate*.json`, what `twofour-bench cuda generate -o` writes."""

import json
import statistics

import markdown

# What is faster, than what, in what, and by how much at least.
FLOORS = [
    ("twofour 2:4-bf16", "twofour dense-bf16", "decode_s", 1.4),
    ("twofour 2:4-bf16-int8-head", "llama.cpp Q8_0", "decode_s", 1.3),
    ("twofour 2:4-bf16", "llama.cpp Q8_0", "decode_s", 1.3),
    ("twofour 2:4-int8", "llama.cpp Q8_0", "decode_s", 2.0),
    ("twofour 2:4-int8", "llama.cpp Q4_0", "decode_s", 1.5),
    ("twofour 2:4-int4", "twofour 2:4-int8", "decode_s", 1.2),
]


def ratios(ours, theirs, seconds):
    """Their time by ours: of the medians, of the fastest rounds, and the quartiles of the rounds' own ratios."""
    rounds = sorted(b / a for a, b in zip(ours[seconds], theirs[seconds]))
    quartiles = statistics.quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else [rounds[0]] * 3
    medians = statistics.median(theirs[seconds]) / statistics.median(ours[seconds])
    return medians, min(theirs[seconds]) / min(ours[seconds]), quartiles[0], quartiles[2]


def floors(result):
    """(what, floor, ratio of medians, of the fastest rounds, quartiles) of each floor whose programs were measured."""
    rows = {row["contender"]: row for row in result["rows"]}
    found = []
    for ours, theirs, seconds, floor in FLOORS:
        if ours in rows and theirs in rows:
            what = f"decode, {ours.removeprefix('twofour ')} over {theirs.removeprefix('twofour ')}"
            found.append((what, floor, *ratios(rows[ours], rows[theirs], seconds)))
    others = [row for name, row in rows.items() if name.startswith("llama.cpp")]
    sparse = [row for name, row in rows.items() if name.startswith("twofour 2:4")]
    if others and sparse:
        fastest = min(others, key=lambda row: statistics.median(row["prefill_s"]))
        for ours in sparse:
            what = (
                f"prefill, {ours['contender'].removeprefix('twofour ')} over {fastest['contender']}, llama.cpp's"
                " fastest"
            )
            found.append((what, 1.0, *ratios(ours, fastest, "prefill_s")))
    return found


def size(count):
    return f"{count / 2**30:.2f} GiB"


def table(path, raw):
    """Programs, and under them the speedups that have floors."""
    result = json.loads(path.read_text())
    machine, model = result["machine"], result["model"]
    loads = [load for load in result["load_average"] if load is not None]
    versions = dict.fromkeys(row["version"] for row in result["rows"] if row.get("version"))
    rounds = len(result["load_average"])
    load = f"load average {min(loads):.1f} to {max(loads):.1f}" if loads else "load average unknown"
    text = (
        f"**{model['name']}**, {model['layers']} layers, {model['vocabulary']} tokens, {model['parameters'] / 1e9:.2f}"
        f" billion parameters; {machine['cpu']}, engine {machine['engine']}, {machine['threads']} threads;"
        f" `{result['command']}` ([raw]({raw})); {rounds} rounds, {load}"
        + "".join(f"; {v}" for v in versions)
        + "."
    )
    body = []
    for row in result["rows"]:
        rates = [f"{row[key]:.1f}" for key in ("decode_tokens_per_s", "best_decode_tokens_per_s")]
        rates += [f"{row[key]:.0f}" for key in ("prefill_tokens_per_s", "best_prefill_tokens_per_s")]
        peak = size(row["peak_memory_bytes"]) if row["peak_memory_bytes"] else ""
        body.append([row["contender"], size(row["weight_bytes"]), *rates, peak])
    prefill = f"prefill of {result['prompt']}, tokens/s: median"
    head = ["program", "weights", "decode tokens/s: median", "best", prefill, "best", "peak memory"]
    clauses = [
        [what, f"{floor:.1f}x", f"{medians:.2f}x", f"{fastest:.2f}x", f"{low:.2f}x to {high:.2f}x"]
        for what, floor, medians, fastest, low, high in floors(result)
    ]
    of_rounds = ["ratio of medians", "of the fastest rounds", "quartiles of the rounds' ratios"]
    return markdown.under(text, head, body) + ("\n" + markdown.rows(["speedup", "floor", *of_rounds], clauses) if clauses else "")


def memory(row, first):
    """Memory of a row. Older files have what the driver's free memory fell by, which is right for the first batch
    alone: the pool keeps what it took for it.
    """
    found = row.get("allocated_bytes", row.get("memory_bytes") if row["batch"] == first else None)
    return size(found) if found else "-"


# Forms that a GPU's other forms are compared with, where they were measured.
GPU_BASES = {"dense-bf16": "dense bf16", "dense-int8": "dense int8", "int4-weight-only": "dense int4"}


def gpu_table(path, raw):
    """Decoding by a replayed CUDA graph: a row for each form of weights and batch size, with its speedups over the
    dense forms of the same batch size.
    """
    result = json.loads(path.read_text())
    rows = {(row["model"], row["batch"], row["weights"]): row for row in result["rows"]}
    first = result["rows"][0]["batch"]
    bases = {base: name for base, name in GPU_BASES.items() if any(weights == base for _, _, weights in rows)}
    over_bases = [f"over {name}" for name in bases.values()]
    heads = ["model", "batch", "weights", "step", "tokens/s", *over_bases, "GB/s", "model size", "memory"]
    text = (
        f"**{result['machine']['gpu']}**, `{result['command']}` ([raw]({raw})): medians of rounds of 16 steps."
        " GB/s: of the weights, keys and values that a step reads. Model size: of the linear layers' weights and"
        " the head."
    )
    body = []
    for (model, batch, weights), row in rows.items():
        over = [rows.get((model, batch, base)) for base in bases]
        over = ["" if base is None or base is row else f"{base['step_ms'] / row['step_ms']:.2f}x" for base in over]
        step = [f"{row['step_ms']:.2f} ms", f"{row['tokens_per_s']:.0f}"]
        sizes = [f"{row['gb_per_s']:.0f}", size(row["weight_bytes"]), memory(row, first)]
        shape = f"{model}, {row['layers']} layers" if "layers" in row else model
        body.append([shape, batch, weights, *step, *over, *sizes])
    return markdown.under(text, heads, body)
