#!/usr/bin/env python3
"""Validation loss of a GPT by training method, over seeds: many runs of `twofour train`.

    python3 bench/studies/accuracy_study.py OUT --twofour target/release/twofour --text FILE...
        [--recipe recipes/study.toml] [--device cuda] [--seeds 3]
        [--only METHOD...] [--jobs 4] [--limit SECONDS] [--set KEY=VALUE...]

Each run leaves OUT/<method>-<seed>.json, what `twofour train` reports, without the recipe's paths. A run whose file is
there is not repeated, and one that was stopped goes on where it was, so a study may take many sittings. JOBS runs share
the device. Runs begin in the order seed by seed, so that every method has a result early.
"""

import pathlib
import sys

import training_study


def main() -> int:
    parser = training_study.parser(__doc__.splitlines()[0], "recipes/study.toml", list(training_study.METHODS))
    parser.add_argument("--text", type=pathlib.Path, nargs="+", required=True)
    options = parser.parse_args()
    data = {"text": [str(path.resolve()) for path in options.text]}
    return training_study.study(options, data, lambda report: f"validation loss {report['val_loss']:.4f}")


if __name__ == "__main__":
    sys.exit(main())
