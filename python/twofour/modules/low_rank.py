"""A linear layer whose weight is the product of two of a lower rank, alone or beside a 2:4 part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import registration
from .conversion import is_in_out, is_sparse, replace, take_over
from .linear import Linear


class LowRankLinear(nn.Module):
    """``y = S(Qx) + bias``, or ``y = S(Qx) + Px + bias`` with a 2:4 part ``P``: in the place of ``y = Wx + bias``.

    ==========  =============================================================================
    ``q``       ``nn.Linear`` with ``Q``, ``[rank, in_features]``
    ``s``       ``nn.Linear`` with ``S``, ``[out_features, rank]``, and the bias
    ``sparse``  a :class:`twofour.Linear` with ``P``, ``[out_features, in_features]``, or none
    ==========  =============================================================================

    All train but ``P``, which is frozen.

    Args:
        in_features: columns of the weight.
        out_features: rows of the weight.
        rank: the inner dimension.
        bias: whether there is a bias.
        sparse: whether there is a 2:4 part.
        device: where the layer lives.
        dtype: of its weights; with a 2:4 part float32, bfloat16 or float16.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        *,
        sparse: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        registration.with_transformers()
        self.in_features = in_features
        self.out_features = out_features
        self.q = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.s = nn.Linear(rank, out_features, bias=bias, device=device, dtype=dtype)
        self.sparse = Linear(in_features, out_features, bias=False, device=device, dtype=dtype) if sparse else None

    @property
    def rank(self) -> int:
        """The inner dimension."""
        return self.q.out_features

    @property
    def weight(self) -> torch.Tensor:
        """The whole weight, dense: computed when it is read."""
        product = _dense(self.s) @ _dense(self.q)
        return product if self.sparse is None else product + _dense(self.sparse)

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, of ``s``."""
        return self.s.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., out_features]`` for an input ``[..., in_features]``."""
        y = self.s(self.q(x))
        return y if self.sparse is None else y + self.sparse(x)

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """A dense layer with the whole weight."""
        dense = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        dense.weight = nn.Parameter(self.weight, requires_grad=self.s.weight.requires_grad)
        dense.bias = self.bias
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


def _dense(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight
    return weight.to_dense() if is_sparse(weight) else weight


def load_low_rank_(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True):
    """Loads what a model became by :func:`twofour.low_rank_` into the model that it was: linear layers of which the
    state dict has factors or a 2:4 weight are replaced first, in place.

    Args:
        model: the dense model.
        state_dict: ``state_dict()`` of the model with factors, or what :func:`twofour.load_file` read of a file that
            :func:`twofour.save_file` wrote of it.
        strict: as for ``load_state_dict``.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict``.

    Raises:
        ValueError: where the model itself is such a layer.
        RuntimeError: where factors do not fit their layer, with its name, before anything is replaced; for other names
            or shapes that do not fit, as ``load_state_dict``.
    """
    pairs = [
        (module, take_over(new, module))
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_in_out(module)) and (new := _counterpart(name, module, state_dict))
    ]
    if any(old is model for old, _ in pairs):
        raise ValueError(
            f"the model itself is a {type(model).__name__}, which cannot be replaced in place: wrap it in "
            f"nn.Sequential"
        )
    replace(model, pairs)
    return model.load_state_dict(state_dict, strict=strict)


def _counterpart(name: str, module: nn.Module, state: Mapping[str, Any]) -> nn.Module | None:
    """The empty layer that a state dict has in the place of a dense one; ``None`` where that is dense, too."""
    if isinstance(module, Linear):
        return None
    prefix = f"{name}." if name else ""
    rows, cols = module.weight.shape[::-1] if is_in_out(module) else module.weight.shape
    q, s = (state.get(f"{prefix}{factor}.weight") for factor in "qs")
    device, has_bias = module.weight.device, module.bias is not None
    if q is not None and s is not None:
        if q.dim() != 2 or s.dim() != 2 or (s.shape[0], q.shape[1]) != (rows, cols) or s.shape[1] != q.shape[0]:
            raise RuntimeError(
                f"{name!r}: factors {list(s.shape)} and {list(q.shape)} do not stand for a weight [{rows}, {cols}]"
            )
        sparse = any(f"{prefix}sparse.{part}" in state for part in ("weight", "weight_values"))
        return LowRankLinear(cols, rows, len(q), has_bias, sparse=sparse, device=device, dtype=s.dtype)
    values, weight = state.get(f"{prefix}weight_values"), state.get(f"{prefix}weight")
    if values is None and (weight is None or not is_sparse(weight)):
        return None
    return Linear(cols, rows, has_bias, device=device, dtype=(weight if values is None else values).dtype)
