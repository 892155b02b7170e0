"""The table and the picture of real models from `bench/results/accuracy/real-models.json`: what
`bench/studies/real_models.py` left.
"""

import json
import statistics

import markdown

QUESTIONS = "questions"
COLOURS = ["#0a7", "#c50", "#36c", "#a3a"]


def mean(rows, name):
    """The mean of a field over the seeds; none where a row has none."""
    values = [row.get(name) for row in rows]
    return None if not values or None in values else statistics.mean(values)


def grouped(result):
    """Rows by model, label and text, in the file's order."""
    found = {}
    for row in result["rows"]:
        found.setdefault(row["model"], {}).setdefault(row["label"], {}).setdefault(row["text"], []).append(row)
    return found


def with_gap(rows):
    """A perplexity in the mean of its seeds, with the gap behind it."""
    perplexity, gap = mean(rows, "perplexity"), mean(rows, "gap")
    if perplexity is None:
        return "-"
    spread = ""
    if len(rows) > 1:
        spread = f" ({min(row['perplexity'] for row in rows):.2f} to {max(row['perplexity'] for row in rows):.2f})"
    return f"{perplexity:.2f}{spread}" + ("" if gap is None else f", {gap:.2f}")


def share(rows):
    accuracy, error = mean(rows, "accuracy"), mean(rows, "accuracy_stderr")
    return "-" if accuracy is None else f"{100 * accuracy:.1f} ± {100 * error:.1f}"


def table(path, link):
    """A row for each model and method: the mean of its seeds."""
    result = json.loads(path.read_text())
    texts = list(dict.fromkeys(row["text"] for row in result["rows"] if row["text"] != QUESTIONS))
    asked = next((row["questions"] for row in result["rows"] if row["text"] == QUESTIONS), 0)
    note = (
            f"Windows of {result['window']} tokens over whole texts; gap: what is left of SparseGPT's damage, (method"
            f" - dense) / (SparseGPT - dense) with the same seed; bytes are those of the compressed weights; {asked}"
            f" questions of four choices, in percent with their standard error. By `bench/studies/real_models.py`"
            f" ([raw]({link}))."
    )
    of_texts = [f"{text}: perplexity (seeds), gap" for text in texts]
    body = []
    for model, labels in grouped(result).items():
        for label, by_text in labels.items():
            every = [row for rows in by_text.values() for row in rows]
            seeds = len({row["seed"] for row in every})
            size, minutes = mean(every, "bytes"), mean(every, "minutes")
            cells = [with_gap(by_text.get(text, [])) for text in texts]
            cells += [share(by_text.get(QUESTIONS, [])), f"{size / 1e6:.0f}"]
            body.append([model, label, seeds, *cells, "" if minutes is None else f"{minutes:.1f}"])
    return markdown.under(note, ["model", "method", "seeds", *of_texts, "right answers", "MB", "minutes"], body)


#: The rows of the README's table: labels of `real_models.py`, and what they are called there.
SHORT = {
    "dense": "dense",
    "sparsegpt, mixed text": "SparseGPT",
    "default, mixed text": "`twofour prune`, by default",
    "default, in int4, mixed text": "the same with `--quantize int4`",
    "default, recovered, mixed text": "by default, then recovered from the dense model",
    "default, recovered in int4, mixed text": "by default, then recovered in int4",
}


def short_table(path, model):
    """One model's perplexities, right answers and size by the methods of `SHORT`."""
    by_label = grouped(json.loads(path.read_text()))[model]
    body = []
    for label, name in SHORT.items():
        by_text = by_label[label]
        cells = [mean(by_text.get(text, []), "perplexity") for text in ("wikitext2-test", "code")]
        cells = ["not measured" if cell is None else f"{cell:.2f}" for cell in cells]
        answers = share(by_text.get(QUESTIONS, []))
        size = mean([row for rows in by_text.values() for row in rows], "bytes")
        cells += ["not measured" if answers == "-" else f"{answers} %", f"{size / 1e6:.0f}"]
        body.append([name, *cells])
    return markdown.rows(["method", "wikitext-2 test", "code", "right answers", "MB"], body)


def points(result):
    """Bytes, perplexity on the first text and label of each method, by model."""
    found = {}
    for model, labels in grouped(result).items():
        for label, by_text in labels.items():
            rows = next((rows for text, rows in by_text.items() if text != QUESTIONS), [])
            if (perplexity := mean(rows, "perplexity")) is not None:
                found.setdefault(model, []).append((mean(rows, "bytes"), perplexity, label))
    return found


def picture(path):
    """An SVG of perplexity against bytes, a dot for each method; labels beside them, from the top by perplexity."""
    result = json.loads(path.read_text())
    panels = points(result)
    left, width, gap, top, bottom = 60, 380, 260, 40, 44
    height = top + bottom + max([200, *(18 * len(own) for own in panels.values())])
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {len(panels) * (left + width + gap)} {height}"'
            ' font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        )
    ]
    for index, (model, own) in enumerate(panels.items()):
        x0, colour = index * (left + width + gap) + left, COLOURS[index % len(COLOURS)]
        # Worse than three times the dense perplexity is drawn at the edge, with its figure in the label.
        best = min(perplexity for _, perplexity, _ in own)
        high = min(max(perplexity for _, perplexity, _ in own), 3 * best)
        low, most = best - 0.05 * (high - best or 1), 1.1 * max(size for size, _, _ in own)
        x_of = lambda size: x0 + size / most * width  # noqa: B023, E731
        y_of = lambda p: top + (high - min(p, high)) / ((high - low) or 1) * (height - top - bottom)  # noqa: B023, E731
        parts.append(f'<text x="{x0}" y="18" font-weight="bold">{model}: perplexity against megabytes</text>')
        parts.append(f'<path d="M{x0} {top}V{height - bottom}H{x0 + width}" fill="none" stroke="#999"/>')
        for part in range(5):
            size, perplexity = most * part / 4, low + (high - low) * part / 4
            parts.append(
                f'<text x="{x_of(size):.1f}" y="{height - bottom + 16}" text-anchor="middle">{size / 1e6:.0f}</text>'
                f'<text x="{x0 - 6}" y="{y_of(perplexity) + 4:.1f}" text-anchor="end">{perplexity:.1f}</text>'
            )
        beside, y = x0 + width + 12, top - 14
        for size, perplexity, label in sorted(own, key=lambda point: -point[1]):
            # Labels keep a line's distance from each other.
            y = max(y + 16, min(y_of(perplexity), height - bottom))
            parts.append(
                f'<circle cx="{x_of(size):.1f}" cy="{y_of(perplexity):.1f}" r="4" fill="{colour}"/>'
                f'<path d="M{x_of(size) + 5:.1f} {y_of(perplexity):.1f}L{beside - 3} {y:.1f}" stroke="#ddd"/>'
                f'<text x="{beside}" y="{y + 4:.1f}">{label}: {perplexity:.2f}, {size / 1e6:.0f} MB</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"
