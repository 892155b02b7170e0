"""The tables of docs/reference/pytorch-benchmarks.md, from `bench/results/*/python-*.json`: what
`bench/python/{host,linear,int4,models,training,vit_step,distributed,gpt_study}.py` wrote."""

import json
import re

from accuracy_tables import SPREAD, by_method
from markdown import rows, under


def read(folder, name):
    path = folder / f"python-{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def host_table(folder):
    """Host time of a call."""
    found = read(folder, "host")
    if found is None:
        return ""
    body = [
        [name, f"{us['min_us']:.1f} µs", f"{us['median_us']:.1f} µs"]
        for name, us in found["results"].items()
        if "operator" not in name
    ]
    head = ["call, 8 tokens of 64 features", "least", "median"]
    return under(f"**{found['machine']}**, torch {found['torch']}", head, body)


def transformers_table(folder):
    """Whole models, and whole training steps of a GPT."""
    found = read(folder, "models")
    if found is None:
        return ""
    body = [
        [
            row["model"],
            row["path"],
            f"{row['batch']} x {row['tokens']}",
            row["form"],
            f"{row['dense_ms']:.2f} ms",
            f"{row['ours_ms']:.2f} ms",
            f"{row['speedup']:.2f}x",
            f"{row['ours_bytes'] / row['dense_bytes']:.2f}" if row["dense_bytes"] else "-",
        ]
        for row in found["rows"]
    ]
    head = ["model", "path", "batch x tokens", "form", "dense", "2:4", "dense over 2:4", "memory over dense"]
    return under(f"**{found['machine']}**, torch {found['torch']}, commit {found['commit']}", head, body)


def int4_table(folder):
    """Linear layers of a decoding step with int4 weights."""
    found = read(folder, "int4")
    if found is None:
        return ""
    names = list(found["rows"][0]["times"])
    dense, ours = "dense int4 (torch)", "2:4 int4 (twofour)"
    body = []
    for row in found["rows"]:
        us = {name: row["times"][name]["us"] for name in names}
        body.append(
            [
                f"{row['layer']} {row['shape']}",
                row["tokens"],
                *(f"{us[name]:.1f} µs" for name in names),
                f"{us[dense] / us[ours]:.2f}x",
            ]
        )
    for tokens, ms in found["linear_ms_per_step"].items():
        body.append(
            ["all of a step", tokens, *(f"{ms[name]:.2f} ms" for name in names), f"{ms[dense] / ms[ours]:.2f}x"]
        )
    head = ["layer", "tokens", *names, "2:4 over dense int4"]
    return under(f"**{found['device']}**, torch {found['torch']}, groups of {found['group']}", head, body)


CASE = re.compile(
    r"(?P<layer>.*) \[(?P<rows>\d+), (?P<cols>\d+)\], (?P<tokens>\d+) tokens, torch\.(?P<dtype>\w+), (?P<way>\w+)"
)


def linear_table(folder):
    """Linear layers: summed over the layers of Llama 3 8B, then a training step's layer, then pruning."""
    found = read(folder, "linear")
    if found is None:
        return ""
    sums = {}
    for name, times in found["results"].items():
        case = CASE.fullmatch(name)
        if case:
            of = sums.setdefault((int(case["tokens"]), case["dtype"], case["way"]), {})
            for who, time in times.items():
                of.setdefault(who, []).append(time["us"])
    body = []
    for (tokens, dtype, way), of in sums.items():
        ours, dense, peer = (of.get(who, []) for who in ("twofour", "dense", "torch's class"))
        worst = min(d / o for d, o in zip(dense, ours, strict=True))
        over_peer = f"{sum(peer) / sum(ours):.2f}x" if len(peer) == len(ours) else "-"
        what = f"{len(ours)} layers, {tokens} token{'' if tokens == 1 else 's'}, {dtype}, {way}"
        body.append(
            [
                what,
                f"{sum(dense):.0f} µs",
                f"{sum(ours):.0f} µs",
                f"{sum(dense) / sum(ours):.2f}x",
                f"{worst:.2f}x",
                over_peer,
            ]
        )
    for name, times in found["results"].items():
        if CASE.fullmatch(name):
            continue
        base = times.get("dense") or times.get("torch's tile operator")
        gain = f"{base['us'] / times['twofour']['us']:.2f}x" if base else "-"
        peer = gain if "dense" not in times else "-"
        body.append(
            [
                name.replace("torch.", ""),
                f"{base['us']:.0f} µs" if base else "-",
                f"{times['twofour']['us']:.0f} µs",
                gain,
                gain,
                peer,
            ]
        )
    head = ["", "dense (pruning: torch's operator)", "twofour", "speedup", "worst layer", "over torch's 2:4"]
    threads = f", {found['threads']} threads" if found["engine"] else ""
    return under(f"**{found['machine']}**{threads}, torch {found['torch']}, {found['rounds']} rounds", head, body)


def model_table(folder):
    """A training step of ViT-L."""
    found = read(folder, "vit_step")
    if found is None:
        return ""
    body = []
    for name, of in found["results"].items():
        dense, sparse = of["dense"], of["2:4"]
        # The H200's record is of peaks while both models were in memory.
        memory = f"{sparse['peak_bytes'] / dense['peak_bytes']:.2f} of the memory"
        times = [f"{dense['ms']:.1f} ms", f"{sparse['ms']:.1f} ms", f"{dense['ms'] / sparse['ms']:.3f}x; {memory}"]
        body.append([f"training step, {name}, compiled", *times])
    return under(f"**{found['machine']}**, torch {found['torch']}", ["", "dense", "2:4", "speedup"], body)


def parallel_table(folder):
    """Training steps on several GPUs."""
    found = read(folder, "distributed")
    if found is None:
        return ""
    body = []
    for row in found["rows"]:
        dense_host, host = row["dense_host_ms"], row["ours_host_ms"]
        body.append(
            [
                row["model"],
                f"{row['batch']} x {row['tokens']}",
                row["path"],
                str(row["gpus"]),
                f"{row['dense_ms']:.1f} ms",
                f"{row['ours_ms']:.1f} ms",
                f"{row['speedup']:.2f}x",
                f"{dense_host:.1f} and {host:.1f} ms ({100 * (host / dense_host - 1):+.0f} %)",
                f"{row['ours_bytes'] / row['dense_bytes']:.2f}",
                {True: "equal", False: "**differ**", None: "-"}[row["masks_equal"]],
            ]
        )
    head = ["model", "batch x tokens", "path", "GPUs", "dense", "2:4", "dense over 2:4", "host, dense and 2:4"]
    head += ["memory over dense", "masks of the ranks"]
    return under(f"**{found['machine']}**, torch {found['torch']}, commit {found['commit']}", head, body)


def study_table(folder):
    """Held-out loss of a small GPT by method, over seeds."""
    found = read(folder, "gpt_study")
    if found is None:
        return ""
    losses = {}
    for run in found["runs"]:
        losses.setdefault(run["method"], []).append(run["held_out_loss"])
    return rows(["method", "seeds", "held-out loss, nats a byte", *SPREAD], by_method(losses))


def tables(of):
    """A function of `readme_tables.DOCUMENTS` for every machine with results."""

    def make(path):
        return of(path.parent)

    return make
