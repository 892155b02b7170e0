"""Attention of one new token: keys and values that several query heads share are read once.

In what torch.compile makes of a model, transformers' ``sdpa`` copies keys and values for each query head before it
multiplies them, and reads the copies again. From a few sequences on this takes longer than the linear layers.
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
    """
    batch, heads, queries, _ = query.shape
    groups = getattr(module, "num_key_value_groups", 1)
    is_shared = attention_mask is None or attention_mask.shape[1] == 1
    if queries != 1 or groups == 1 or not is_shared or any(value is not None for value in _others(options)):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    grouped = query.reshape(batch, heads // groups, groups, query.shape[-1])
    # All keys that the mask shows: a new token is behind them.
    out = F.scaled_dot_product_attention(grouped, key, value, attention_mask, dropout, scale=scaling)
    # The batch is that of the keys, where one query is for all of them.
    return out.reshape(out.shape[0], heads, 1, out.shape[-1]).transpose(1, 2).contiguous(), None


def _others(options: dict):
    """What changes the scores in another way."""
    return (options.get(name) for name in ("softcap", "position_bias", "s_aux"))


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def group_queries(model: nn.Module) -> None:
    """Gives a model that attends by ``sdpa`` this attention."""
    _exchange(model, _STANDARD, NAME)


def separate_queries(model: nn.Module) -> None:
    """Undoes :func:`group_queries`."""
    _exchange(model, NAME, _STANDARD)


def _exchange(model: nn.Module, old: str, new: str) -> None:
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not models or models[0] is not model or any(part.config._attn_implementation != old for part in models):
        return
    if all(map(_takes_any, {type(part) for part in models})):
        model.set_attn_implementation(new)


def _takes_any(kind: type) -> bool:
    """Whether the code of a model attends by what its configuration names, and does something else for no name."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source and not re.search(f"[\"']{_STANDARD}[\"']", source)
