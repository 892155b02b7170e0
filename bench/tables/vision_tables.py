"""The table of the study of vision transformers, from what `bench/studies/vision_study.py` left: `python3
bench/tables/vision_tables.py FOLDER`.
"""

import json
import pathlib
import statistics
import sys

from markdown import under


def results(folder):
    """Reports by method, in the order of the mean accuracy of their heads."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        found.setdefault(report["method"], []).append(report)
    return dict(sorted(found.items(), key=lambda item: -statistics.mean(report["val_accuracy"] for report in item[1])))


def cells(of):
    """Mean, and least to largest, of shares in percent."""
    percent = [100 * share for share in of]
    return f"{statistics.mean(percent):.2f} %", f"{min(percent):.2f} to {max(percent):.2f}"


def table(folder):
    """A row for each method."""
    found = results(folder)
    report = next(iter(found.values()))[0]
    model, data, training = (report["recipe"][section] for section in ("model", "data", "training"))
    images = report["data_tokens"] // (
        (model["image"] // model["patch"]) ** 2 + (model.get("pooling", "class") == "class")
    )
    unseen = int(images * data["validation"])
    where = "f32 on a CPU" if report["device"] == "cpu" else f"bf16 on an {folder.parent.name.upper()}"
    text = (
            f"{model['layers']} layers of width {model['width']}, patches of {model['patch']} x {model['patch']}"
            f" pixels, {training['steps']} steps of {training['batch']} images of {data['images']}: {images - unseen}"
            f" to train on, {unseen} to judge by; {where}."
    )
    body = []
    for method, reports in found.items():
        heads = [report["val_accuracy"] for report in reports]
        probes = [report["linear_probe"]["validation_accuracy"] for report in reports]
        body.append([method, len(reports), *cells(heads), *cells(probes)])
    spread = "least to largest"
    return under(text, ["method", "seeds", "accuracy of the head", spread, "of regression on features", spread], body)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not list(pathlib.Path(sys.argv[1]).glob("*.json")):
        sys.exit("usage: vision_tables.py FOLDER, with the JSON files that vision_study.py left")
    print(table(pathlib.Path(sys.argv[1]).resolve()), end="")
