"""The table of the study of strategies, from `bench/results/*/strategies-*.json`, which
`bench/studies/strategies.py` left as `strategies.json`.
"""

import json

from markdown import under


def pruning(options):
    """The command that prunes first."""
    if options is None:
        return "-"
    calibration = [] if "magnitude" in options else ["--calibration TEXT"]
    return f"`{' '.join(['prune', *options.split(), *calibration])}`"


def table(path, link):
    """A row for each strategy, the best first within those that train nothing and those that train."""
    study = json.loads(path.read_text())
    budget, dense = study["budget"], study["dense"]
    (trained,) = [row["perplexity"] for row in study["rows"] if not row["two_of_four"]]
    text = (
        f"{study['model']} on {study['device']} ([raw]({link})), all linear layers of its blocks 2:4. Budget: "
        f"{budget['steps']} steps of {budget['batch']} x {budget['context']} tokens of {', '.join(study['text'])}, "
        f"learning rate {budget['rate']:g} to a tenth of it, "
        f"seed {budget['seed']}. Perplexity a token of {study['held_out']}: dense "
        f"{dense:.3f}, and {trained:.3f} when it trains on with the same budget."
    )
    body = []
    sparse = [row for row in study["rows"] if row["two_of_four"]]
    for row in sorted(sparse, key=lambda row: (bool(row["recipe"]), row["perplexity"])):
        base = trained if row["recipe"] else dense
        body.append(
            [
                row["strategy"],
                pruning(row["prune"]),
                f"`{row['recipe']}.toml`" if row["recipe"] else "-",
                f"{row['perplexity']:.3f}",
                f"{100 * (row['perplexity'] / base - 1):+.1f} %",
                f"{row['seconds']:.0f} s" if row["recipe"] else "-",
            ]
        )
    head = ["strategy", "pruned first by", "recipe", "perplexity", "over dense of the same budget", "steps took"]
    return under(text, head, body)
