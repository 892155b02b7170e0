"""Names of the files of a model's folder that holds packed weights.

transformers reads ``model.safetensors`` and knows nothing of packed weights: it would initialize the layers at random.
So in a folder these files have names that it does not look for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re

#: What stands before the ordinary name of a file of weights, or of an index, in a folder that holds packed weights.
PREFIX = "twofour-"
_CONFIG = "config.json"
#: The file that says what such a folder is, and its text.
README = "README-twofour.md"
README_TEXT = """\
# 2:4 weights of twofour

The files `twofour-*.safetensors` of this directory hold weights in twofour's packed 2:4 format. Their names are such that transformers alone finds no
weights here, instead of layers that it would initialize at random.

- Python: `pip install twofour`, then `import twofour.transformers` before `from_pretrained`.
- The command: `twofour eval DIR`, `twofour generate DIR`, `twofour check DIR`.
- An ordinary checkpoint, dense with zeros: `twofour decompress DIR -o OUT`.
"""


def names_of(ordinary: str, variant: str | None) -> tuple[tuple[str, str], tuple[str, str]]:
    """The ordinary names of a model's file and of its index, and those of packed weights.

    Args:
        ordinary: ``"model.safetensors"``, or another file or index.
        variant: ``"fp16"`` for instance. transformers has it before the end of a name; an index of packed weights is
            found by its end only.
    """
    stem = ordinary.removesuffix(".index.json").removesuffix(".safetensors")
    dotted = f".{variant}" if variant else ""
    file = f"{stem}{dotted}.safetensors"
    return (file, f"{stem}.safetensors.index{dotted}.json"), (PREFIX + file, f"{PREFIX}{file}.index.json")


def packed_in(folder: str, ordinary: tuple[str, str], packed: tuple[str, str]) -> list[str]:
    """Which of two names of packed weights a folder has.

    Raises:
        ValueError: where it has ordinary weights as well.
    """
    plain, own = (
        [name for name in names if os.path.isfile(os.path.join(folder, name))] for names in (ordinary, packed)
    )
    if plain and own:
        raise ValueError(
            f"{folder} has packed weights, {own[0]}, and ordinary ones, {plain[0]}: remove those that do not belong to "
            "config.json"
        )
    return own


def is_of_weights(name: str, variant: str | None) -> bool:
    """Whether ``save_pretrained`` writes a file of that name, packed or not: a model, a shard of one, or an index."""
    names, packed = names_of("model.safetensors", variant)
    shard = re.escape(names[0].removesuffix(".safetensors")) + r"-\d+-of-\d+\.safetensors"
    return name in names + packed or re.fullmatch(shard, name.removeprefix(PREFIX)) is not None


def publish(staged: str, folder: str, variant: str | None) -> None:
    """Moves what ``save_pretrained`` wrote to a folder, under the names of packed weights, and removes weights that
    were there.

    What makes a folder readable, an index and ``config.json``, goes first and comes last, so that a folder which is
    left in the middle is refused rather than read as a mixture of two models.
    """
    ordinary, packed = names_of("model.safetensors", variant)
    indexes = {ordinary[1], packed[1]}
    targets = {}
    for name in os.listdir(staged):
        targets[name] = name
        if is_of_weights(name, variant):
            targets[name] = packed[1] if name == ordinary[1] else PREFIX + name
    if ordinary[1] in targets:
        _rename_shards(os.path.join(staged, ordinary[1]))
    with open(os.path.join(staged, README), "w", encoding="utf-8") as file:
        file.write(README_TEXT)
    targets[README] = README
    for name in indexes | ({_CONFIG} & targets.keys()):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, name))
    for name in os.listdir(folder):
        if is_of_weights(name, variant) and name not in targets.values():
            os.remove(os.path.join(folder, name))
    for name in sorted(targets, key=lambda name: (name == _CONFIG, name in indexes)):
        os.replace(os.path.join(staged, name), os.path.join(folder, targets[name]))


def _rename_shards(index: str) -> None:
    with open(index, encoding="utf-8") as file:
        content = json.load(file)
    content["weight_map"] = {tensor: PREFIX + shard for tensor, shard in content["weight_map"].items()}
    with open(index, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
