"""What torch.compile does with the masks of a model: those of many weights are chosen by one operator of a graph.

An operator for each weight takes longer of the host than the GEMMs of small layers take of the device.
"""

from __future__ import annotations

from operator import getitem
from typing import NamedTuple

import torch

_ATEN, _OPS = torch.ops.aten, torch.ops.twofour


class _Choice(NamedTuple):
    """An operator of a graph that chooses masks of one weight, as what chooses those of many makes it."""

    #: The operator.
    node: torch.fx.Node
    #: The graph's input of which it chooses the mask.
    weight: torch.fx.Node
    #: The operator on many weights.
    target: torch._ops.OpOverload
    #: Its arguments behind the weights.
    others: tuple
    #: The number of its lists; 0 where it returns no tuple but a list.
    results: int

    def key(self) -> tuple:
        """What is alike of operators that one can do."""
        weight = self.weight.meta["val"]
        return self.target, self.others, weight.dtype, weight.device


def _choice(node: torch.fx.Node) -> _Choice | None:
    """What a node chooses, if its weight is there when the graph starts and what it returns can be had together."""
    if node.op != "call_function" or node.kwargs or any(user.target is not getitem for user in node.users):
        return None
    if node.target is _OPS.select_together.default:
        weights, *others = node.args
        if len(weights) != 1:
            return None
        (weight,), target, results = weights, node.target, 0
    elif node.target is _OPS.pack.default:
        weight, rule, scale, transpose, check, *dtype = node.args
        if scale != 1.0 or check or any(user.args[1] > 1 for user in node.users):
            return None
        target, others, results = _OPS.pack_together.default, (rule, transpose, *dtype), 2
    else:
        return None
    while weight.target in (_ATEN.detach.default, _ATEN.alias.default):
        weight = weight.args[0]
    if weight.op != "placeholder" or _is_written(weight):
        return None
    return _Choice(node, weight, target, tuple(others), results)


def _is_written(node: torch.fx.Node) -> bool:
    """Whether an operator of the graph may write to a tensor, as those of compiled FSDP do."""
    return any(getattr(getattr(user.target, "_schema", None), "is_mutable", False) for user in node.users)


def choose_together(graph: torch.fx.Graph) -> None:
    """Makes one operator of those that choose masks of the graph's inputs by the same rule."""
    alike: dict[tuple, list[_Choice]] = {}
    for node in graph.nodes:
        if (choice := _choice(node)) is not None:
            alike.setdefault(choice.key(), []).append(choice)
    for choices in alike.values():
        if len(choices) > 1:
            _replace(graph, choices)


def _replace(graph: torch.fx.Graph, choices: list[_Choice]) -> None:
    """Puts one operator behind the graph's inputs in the place of several."""
    one, values = choices[0], [choice.node.meta["val"] for choice in choices]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        together = graph.call_function(one.target, ([choice.weight for choice in choices], *one.others))
        if one.results:
            lists = [[value[k] for value in values] for k in range(one.results)]
            together.meta["val"] = tuple(lists)
            of = [graph.call_function(getitem, (together, k)) for k in range(one.results)]
            for node, value in zip(of, lists, strict=True):
                node.meta["val"] = value
        else:
            together.meta["val"] = [tensor for value in values for tensor in value]
            of = [together]
    for index, choice in enumerate(choices):
        for user in list(choice.node.users):
            user.args = (of[user.args[1]], index)
        graph.erase_node(choice.node)
    for node in of:
        if not node.users:
            graph.erase_node(node)
