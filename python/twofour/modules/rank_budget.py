"""How a budget is spent on layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Options:
    """What a layer can become.

    Attributes:
        costs: in rising order, each above the one before.
        errors: of the same options; none is above the one before.
    """

    costs: Sequence[int]
    errors: Sequence[float]

    def gain(self, option: int, other: int) -> float:
        """By how much the error falls for each unit of cost, from an option to a later one."""
        return (self.errors[option] - self.errors[other]) / (self.costs[other] - self.costs[option])

    def steps(self) -> Iterator[tuple[float, int]]:
        """Steps on the lower convex hull of the options, with their gains, which fall from step to step."""
        hull: list[int] = []
        for option in range(len(self.costs)):
            while len(hull) > 1 and self.gain(hull[-2], hull[-1]) <= self.gain(hull[-2], option):
                hull.pop()
            hull.append(option)
        for option, other in zip(hull, hull[1:], strict=False):
            yield self.gain(option, other), other


def spend(budget: int, layers: Sequence[Options]) -> list[int]:
    """The option of each layer with which the sum of errors is smallest, within a step of one layer, and the sum of
    costs at most a budget, which allows the first option of each.
    """
    chosen = [0] * len(layers)
    left = budget - sum(layer.costs[0] for layer in layers)

    def take(index: int, option: int) -> bool:
        nonlocal left
        cost = layers[index].costs[option] - layers[index].costs[chosen[index]]
        if cost > left:
            return False
        left -= cost
        chosen[index] = option
        return True

    steps = [(-gain, index, to) for index, layer in enumerate(layers) for gain, to in layer.steps() if gain > 0]
    full = set()
    for _, index, option in sorted(steps):
        if index not in full and not take(index, option):
            full.add(index)
    # What is left pays for smaller steps.
    while True:
        further = [
            (layer.gain(now, option), index, option)
            for index, (layer, now) in enumerate(zip(layers, chosen, strict=True))
            for option in {now + 1, len(layer.costs) - 1}
            if now < option < len(layer.costs) and layer.costs[option] - layer.costs[now] <= left
        ]
        gain, index, option = max(further, default=(0.0, 0, 0))
        if gain <= 0:
            return chosen
        take(index, option)
