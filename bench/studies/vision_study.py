#!/usr/bin/env python3
"""Accuracy of a small vision transformer by training method, over seeds, by its head and by logistic regression on its
features: many runs of `twofour train`.

    python3 bench/studies/vision_study.py OUT --twofour target/release/twofour --images t10k-images-idx3-ubyte.gz
        --labels t10k-labels-idx1-ubyte.gz
        [--recipe recipes/study-vit.toml] [--device cuda] [--seeds 3] [--only METHOD...] [--jobs 4] [--limit SECONDS]
        [--set KEY=VALUE...]

The ten thousand test digits of MNIST are enough: the recipe trains on four fifths of them. Each run leaves
OUT/<method>-<seed>.json, what `twofour train` reports, without the recipe's paths. A run whose file is there is not
repeated, and one that was stopped goes on where it was. JOBS runs share the device. `bench/tables/vision_tables.py OUT`
prints the table.
"""

import pathlib
import sys

import training_study

# 100 % sparse is "ste, transposable".
METHODS = [
    "dense",
    "fixed mask",
    "ste, rows",
    "ste, transposable",
    "sr-ste",
    "fst",
    "fst, masks every step",
    "s-ste",
    "step",
    "gradual",
    "40 % sparse, then dense",
    "60 % sparse, then dense",
    "70 % sparse, then dense",
    "80 % sparse, then dense",
    "90 % sparse, then dense",
]


def describe(report: dict) -> str:
    return (
        f"accuracy {report['val_accuracy']:.4f}, of regression on features"
        f" {report['linear_probe']['validation_accuracy']:.4f}"
    )


def main() -> int:
    parser = training_study.parser(__doc__.splitlines()[0], "recipes/study-vit.toml", METHODS)
    parser.add_argument("--images", type=pathlib.Path, required=True)
    parser.add_argument("--labels", type=pathlib.Path, required=True)
    options = parser.parse_args()
    options.set.append("training.linear_probe=true")
    data = {"images": str(options.images.resolve()), "labels": str(options.labels.resolve())}
    return training_study.study(options, data, describe)


if __name__ == "__main__":
    sys.exit(main())
