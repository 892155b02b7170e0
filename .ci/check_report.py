"""Checks what a quickstart left behind: `check_report.py DIR`."""

import json
import math
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
report = json.loads((folder / "report.json").read_text())
problems = []


def expect(holds, what):
    if not holds:
        problems.append(what)


for kind in ("dense", "sparse"):
    for key in ("val_loss", "weight_bytes", "decode_tokens_per_s", "prefill_tokens_per_s"):
        value = report[kind][key]
        expect(math.isfinite(value) and value > 0, f"{kind}.{key} is {value}")
    # A model that has learned nothing about bytes of text has the loss ln 256 = 5.545.
    expect(report[kind]["val_loss"] < 4.5, f"{kind}.val_loss is {report[kind]['val_loss']}: it did not learn")
for key in ("machine", "config"):
    expect(bool(report[key]), f"`{key}` is empty")
pictures = [p for p in folder.rglob("*") if p.suffix in (".svg", ".png") and p.stat().st_size > 1000]
expect(pictures, "there is no picture")
expect(any(folder.rglob("*.safetensors")), "there is no checkpoint")

for problem in problems:
    print("report:", problem, file=sys.stderr)
if not problems:
    shared = [k for k, v in report["dense"].items() if isinstance(v, (int, float)) and k in report["sparse"]]
    print("report holds; sparse / dense:", {k: round(report["sparse"][k] / report["dense"][k], 3) for k in shared})
sys.exit(bool(problems))
