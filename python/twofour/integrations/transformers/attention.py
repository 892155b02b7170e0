"""Attention of one new token: keys and values that several query heads share are read once.

In what torch.compile makes of a model, transformers' ``sdpa`` copies keys and values for each query head before it
multiplies them, and reads the copies again. Of many sequences this takes longer than the linear layers.
"""

from __future__ import annotations

import inspect
import re
import sys

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

#: The name by which configurations know it.
NAME = "twofour"
#: The one that it stands for.
_STANDARD = "sdpa"
#: Options that change the scores in another way.
_CHANGES = ("softcap", "position_bias")


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options,
) -> tuple[torch.Tensor, None]:
    """transformers' ``sdpa``; of one query a head it makes the heads that share keys the queries of one head.

    Args:
        module: the attention module.
        query: ``[batch, heads, queries, features]``.
        key: ``[batch, key heads, keys, features]``.
        value: as the key.
        attention_mask: ``[batch, 1 or heads, queries, keys]``, if there is one.
        dropout: the share of weights that is dropped.
        scaling: the factor of the scores.
        options: what ``sdpa`` takes beside these.

    Returns:
        ``[batch, queries, heads, features]``, and nothing.

    Raises:
        NotImplementedError: for sinks, which ``sdpa`` would leave out.
    """
    if options.get("s_aux") is not None:
        raise NotImplementedError(f"attention {NAME!r} has no sinks: model.set_attn_implementation('eager') has")
    batch, heads, queries, _ = query.shape
    groups = getattr(module, "num_key_value_groups", 1)
    is_shared = attention_mask is None or (attention_mask.dim() == 4 and attention_mask.shape[1] == 1)
    if queries != 1 or groups == 1 or not is_shared or any(options.get(name) is not None for name in _CHANGES):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    grouped = query.reshape(batch, heads // groups, groups, query.shape[-1])
    # All keys that the mask shows: a new token is behind them.
    out = F.scaled_dot_product_attention(grouped, key, value, attention_mask, dropout, scale=scaling)
    # The batch is that of the keys, where one query is for all of them.
    return out.reshape(out.shape[0], heads, 1, out.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def group_queries(model: nn.Module) -> None:
    """Gives models of transformers that attend by ``sdpa`` this attention: the outermost in a module, where all of
    their parts do, and their code takes any."""
    _exchange(model, _STANDARD, NAME)


def separate_queries(model: nn.Module) -> None:
    """Undoes :func:`group_queries`."""
    _exchange(model, NAME, _STANDARD)


def _exchange(module: nn.Module, old: str, new: str) -> None:
    if not isinstance(module, PreTrainedModel):
        for child in module.children():
            _exchange(child, old, new)
        return
    parts = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    uses_old = all(part.config._attn_implementation == old for part in parts)
    if uses_old and all(map(_takes_any, {type(part) for part in parts})):
        module.set_attn_implementation(new)


def _takes_any(kind: type) -> bool:
    """Whether the code of a model attends by what its configuration names, and does something else for no name."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source and not re.search(f"[\"']{_STANDARD}[\"']", source)
