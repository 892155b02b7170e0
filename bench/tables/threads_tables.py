"""Tables by the number of threads of a CPU: whole-model generation from `bench/results/*/threads-generate-N.json`, what
`twofour-bench generate --threads N -o` writes, and linear layers from PyTorch from `python-threads.json`, what
`bench/python/threads.py -o` writes."""

import json

import markdown


def generation(folder, link):
    """A row for each program with its tokens/s by the number of threads; `link` makes a file's link."""
    files = sorted(folder.glob("threads-generate-*.json"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
    results = {result["machine"]["threads"]: result for result in (json.loads(path.read_text()) for path in files)}
    threads = list(results)
    programs = dict.fromkeys(row["contender"] for result in results.values() for row in result["rows"])
    machine, model = (results[threads[-1]][key] for key in ("machine", "model"))
    assert all(result["model"] == model for result in results.values()), "the files are of different models"
    versions = dict.fromkeys(
        row["version"] for result in results.values() for row in result["rows"] if row.get("version")
    )
    raw = ", ".join(f"[{count}]({link(path)})" for count, path in zip(threads, files))
    prompts = ", ".join(f"{result['prompt']} and {result['length']}" for result in results.values())
    text = (
        f"**{model['name']}**, {model['layers']} layers, {model['parameters'] / 1e9:.2f} billion parameters;"
        f" {machine['cpu']}, {machine['hardware_threads']} cores, engine {machine['engine']}; threads: {raw}. Tokens"
        f" of the prompt and written, by the number of threads: {prompts}. "
        + "; ".join(versions)
        + ". Tokens/s: the medians of 1 to 3 rounds. Of 1: how many times the rate of one thread."
    )

    def rates(name, key):
        rows = [next((r for r in result["rows"] if r["contender"] == name), None) for result in results.values()]
        found = [f"{row[key]:.0f}" if row and row[key] >= 100 else f"{row[key]:.1f}" if row else "-" for row in rows]
        scale = f"{rows[-1][key] / rows[0][key]:.1f}" if rows[0] and rows[-1] else "-"
        return [*found, scale]

    body = [[n, *rates(n, "decode_tokens_per_s"), *rates(n, "prefill_tokens_per_s")] for n in programs]
    heads = [f"{kind}, {count}" for kind in ("decode", "prefill") for count in (*threads, f"{threads[-1]} of 1")]
    return markdown.under(text, ["program", *heads], body)


def linear(path, raw):
    """A row for each type, shape and number of tokens: dense time by ours, by the number of threads."""
    result = json.loads(path.read_text())
    threads = sorted({row["threads"] for row in result["rows"]})
    cells = {}
    for row in result["rows"]:
        key = row["dtype"], row["out_features"], row["in_features"], row["tokens"]
        cells.setdefault(key, {})[row["threads"]] = row
    body = []
    for (dtype, rows, cols, tokens), by in cells.items():
        over = [f"{by[count]['speedup']:.2f}x" for count in threads]
        ms = [f"{by[count]['ours_us'] / 1e3:.2f} ms" for count in (threads[0], threads[-1])]
        body.append([dtype, f"[{rows}, {cols}]", str(tokens), *over, *ms])
    heads = [f"{count} thread{'s' if count > 1 else ''}" for count in threads]
    times = [f"ours, {count}" for count in (threads[0], threads[-1])]
    text = (
        f"**{result['machine']}**, {result['hardware_threads']} cores, engine {result['engine']}, torch"
        f" {result['torch']}, {result['rounds']} rounds ([raw]({raw}))."
    )
    return markdown.under(text, ["dtype", "weight [out, in]", "tokens", *heads, *times], body)
