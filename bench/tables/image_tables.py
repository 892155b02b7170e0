"""The table of image encoders from `bench/results/*/encoder-sam-*.json`, what `twofour-bench encoder sam-vit-h -o`
writes.
"""

import json

from generate_tables import memory, size
from markdown import under


def table(path, raw):
    """A row for each form of weights and batch."""
    found = json.loads(path.read_text())
    machine = found["machine"].get("gpu") or found["machine"]["cpu"]
    text = (
            f"**{found['model']}**, {found['dtype']}, images of {found['image'][0]} x {found['image'][1]},"
            f" {found['tokens']} tokens each; {machine}; `{found['command']}` ([raw]({raw}))."
    )
    body = [
        [row["weights"], row["batch"], f"{row['ms']:.1f} ms", f"{row['images_per_s']:.1f}", f"{row['speedup']:.2f}x"]
        + [size(row["weight_bytes"]), memory(row, found["rows"][0]["batch"])]
        for row in found["rows"]
    ]
    head = ["weights", "batch", "time", "images/s", "over dense", "linear layers", "memory"]
    return under(text, head, body)
