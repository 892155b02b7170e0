"""The table and the picture of the study of accuracy, from `bench/results/*/accuracy/*.json`: what
`bench/studies/accuracy_study.py` left.
"""

import json
import statistics

from markdown import under


def losses(folder):
    """Validation losses by method, in the order of their means; and a report."""
    found, report = {}, None
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        found.setdefault(report["method"], []).append(report["val_loss"])
    return dict(sorted(found.items(), key=lambda item: statistics.mean(item[1]))), report


def table(folder):
    """A row for each method."""
    found, report = losses(folder)
    model, training = report["recipe"]["model"], report["recipe"]["training"]
    tokens = training["steps"] * training["batch"] * model["context"] / 1e6
    parameters = 12 * model["layers"] * model["width"] ** 2 / 1e6
    text = (
        f"{model['layers']} layers of width {model['width']} ({parameters:.1f} M parameters), context"
        f" {model['context']}, {training['steps']} steps of {training['batch']} sequences ({tokens:.1f} M bytes) of"
        f" {', '.join(report['recipe']['data']['text'])}; bf16 on an {folder.parent.name.upper()}."
    )
    return under(text, ["method", "seeds", "validation loss, nats a byte", *SPREAD], by_method(found))


SPREAD = ["least to largest", "mean over dense"]


def by_method(found):
    """A row for each method's losses over seeds."""
    dense = statistics.mean(found["dense"])
    for method, of in found.items():
        mean = statistics.mean(of)
        yield method, len(of), f"{mean:.4f}", f"{min(of):.4f} to {max(of):.4f}", f"{100 * (mean / dense - 1):+.2f} %"


def picture(folder):
    """An SVG: a dot for each seed and a line for the mean, method by method."""
    found, _ = losses(folder)
    every = [loss for of in found.values() for loss in of]
    low, high = min(every) - 0.002, max(every) + 0.002
    left, width, row, top = 270, 460, 24, 30
    height = top + row * len(found) + 34
    at = lambda loss: left + (loss - low) / (high - low) * width  # noqa: E731
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 30} {height}"'
            ' font-family="sans-serif" font-size="13">'
        ),
        (
            f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="18">validation loss, nats a byte: a'
            " dot for each seed, a line for the mean</text>"
        ),
    ]
    step = 0.01 if high - low > 0.02 else 0.002
    tick = step * round(low / step + 0.5)
    while tick < high:
        x = at(tick)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - 28}" stroke="#ddd"/><text x="{x:.1f}"'
            f' y="{height - 12}" text-anchor="middle">{tick:.3f}</text>'
        )
        tick += step
    for index, (method, of) in enumerate(found.items()):
        y = top + row * index + row / 2
        color = "#444" if method == "dense" else "#0a7"
        mean = at(statistics.mean(of))
        parts.append(f'<text x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{method}</text>')
        parts.append(
            f'<line x1="{mean:.1f}" x2="{mean:.1f}" y1="{y - 8:.1f}" y2="{y + 8:.1f}" stroke="{color}"'
            ' stroke-width="3"/>'
        )
        parts += [f'<circle cx="{at(loss):.1f}" cy="{y:.1f}" r="4" fill="{color}" fill-opacity="0.5"/>' for loss in of]
    return "\n".join([*parts, "</svg>"]) + "\n"
