"""Models of transformers that are faster to decode with."""

from __future__ import annotations

from torch import nn

from ...modules.fused import Fused, can_be_fused, fuse
from .attention import group_queries, separate_queries

#: The names of layers that a module calls with one input, in the order of the calls.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"))
#: What the names of modules have that attend to another input.
_CROSS = ("cross", "encoder_attn", "visual_attention")


def optimize(model: nn.Module) -> nn.Module:
    """Multiplies queries, keys and values as one weight, and so the gate and the other half of a gated MLP, in place:
    for decoding, where a GEMM of few tokens takes as long as reading its weight only if that is large. Attention by
    ``sdpa`` becomes ``twofour``, the same but for a new token, whose keys and values it reads once for all query heads
    that share them, if the model's code takes any attention. ``model.set_attn_implementation("sdpa")`` undoes that
    alone; ``generate_batch``, which batches continuously, needs it.

    Modules, names, hooks and state dicts stay: layers keep their parameters, and their weights are the rows of one
    packed weight. So do results, within rounding. ``load_state_dict`` and moving a layer to another device or type undo
    it for the layers that they change; copies and what is loaded from files are as before. Layers that cannot be
    multiplied as one, since one is dense or has another type, stay as they are.

    Args:
        model: a model whose layers are :class:`twofour.Linear` or :class:`twofour.Int4Linear`, as those that
            :class:`TwoFourConfig` loads.

    Returns:
        the model.

    Raises:
        ValueError: for a model without such layers: its attention has other names than ``q_proj``, ``k_proj`` and
            ``v_proj`` (of BERT ``query``, ``key`` and ``value``) and its MLP others than ``gate_proj`` and ``up_proj``,
            or they are dense.
    """
    found = list(_groups(model))
    groups = [layers for layers in found if can_be_fused(layers)]
    if not groups and not any(isinstance(module, Fused) for module in model.modules()):
        names = "; ".join(", ".join(group) for group in _GROUPS)
        reason = "are not all twofour.Linear or all twofour.Int4Linear" if found else "do not exist"
        raise ValueError(
            f"{type(model).__name__} has no layers that can be multiplied as one: those of one input, named {names}, "
            f"{reason}. Load the model with a TwoFourConfig, or replace its layers first"
        )
    for layers in groups:
        fuse(layers)
    group_queries(model)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undoes :func:`optimize`: each layer has a weight of its own again, and attention ``twofour`` is ``sdpa``.

    Returns:
        the model.
    """
    for module in list(model.modules()):
        if isinstance(module, Fused):
            module.dissolve()
    separate_queries(model)
    return model


def _groups(model: nn.Module):
    """The layers of one input, in groups."""
    for name, module in model.named_modules():
        # BERT's attention to another text is `crossattention.self`.
        if any(part in own for part in _CROSS for own in name.split(".")[-2:]):
            continue
        for names in _GROUPS:
            layers = [module._modules.get(each) for each in names]
            if all(layer is not None for layer in layers):
                yield layers
