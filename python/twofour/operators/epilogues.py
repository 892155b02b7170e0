"""What torch.compile does with an activation behind a GEMM with a 2:4 weight on a GPU: the GEMM applies it to its sums.

Inductor fuses activations with what computes elements, not with a GEMM. Alone, an activation reads what the GEMM wrote
and writes it again, which takes longer than the sparse GEMMs of a small encoder gain. On a CPU it takes no time worth
sparing.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from .. import operators

#: The activations of a GEMM's epilogue, by their names there.
_ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def activate(graph: torch.fx.Graph) -> None:
    """Has GEMMs apply the activations of their results, where nothing else reads these."""
    products = [node for node in graph.nodes if _is_plain(node)]
    for dtype in {node.meta["val"].dtype for node in products}:
        _activations_of(dtype).apply(graph)


def _is_plain(node) -> bool:
    """Whether a node is a GEMM that could apply an activation."""
    if not isinstance(node, torch.fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    if node.target.namespace != "twofour" or schema.arguments[-1].name != "activation" or node.kwargs:
        return False
    return node.args[-1] == operators.ACTIVATIONS[None] and _gains(node.meta["val"])


def _gains(result: torch.Tensor) -> bool:
    return result.is_cuda


@functools.cache
def _activations_of(dtype: torch.dtype):
    """What finds activations of results of a type, as torch.compile has taken them apart."""
    # Its import takes two seconds. Inductor has done it, others that ask for shapes have not.
    from torch._inductor import pattern_matcher

    def applies(match) -> bool:
        product = match.kwargs["x"]
        return _is_plain(product) and product.meta["val"].dtype == dtype and set(product.users) <= set(match.nodes)

    patterns = pattern_matcher.PatternMatcherPass()
    for name, function in _ACTIVATIONS.items():
        traced = pattern_matcher.fwd_only(lambda x: function(x), [torch.empty(2, 3, dtype=dtype)])  # noqa: B023
        pattern = pattern_matcher.fx_to_pattern(traced, argnames=["x"])
        apply = functools.partial(_apply, number=operators.ACTIVATIONS[name])
        pattern_matcher.register_graph_pattern(pattern, extra_check=applies, pass_dict=patterns)(apply)
    return patterns


def _apply(match, x: torch.fx.Node, number: int) -> None:
    """Puts one GEMM in the place of a GEMM and an activation."""
    result = match.output_node()
    with match.graph.inserting_before(result):
        activated = match.graph.call_function(x.target, (*x.args[:-1], number))
    activated.meta.update(result.meta)
    result.replace_all_uses_with(activated)
    match.erase_nodes()
    match.graph.erase_node(x)
