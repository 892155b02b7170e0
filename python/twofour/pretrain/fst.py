"""FST: training with transposable masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import operators
from ..modules.conversion import SparseLayer
from ..modules.readers import CarriesAttributes
from ..modules.tracing import traceable
from ..operators import masks
from ..operators.master import cast_for_autocast, master_linear, weight_gradient_number
from ..operators.packed import Packed, pack_by_mask

_RULE = operators.rule_number("optimal")

#: Steps of all optimizers of torch in this process. Under FSDP and DeepSpeed the parameter that an optimizer updates is
#: not the layer's.
_optimizer_steps = 0


def _count_step(*_) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


class SparseLinearTranspose(CarriesAttributes, SparseLayer, nn.Linear):
    """A linear layer whose weight has a mask that is 2:4 along rows and along columns, chosen anew every ``freq`` steps
    of the optimizer.

    FST (Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024): forward pass and input
    gradient are sparse GEMMs with the packed weight and its packed transpose; the weight gradient is dense or
    estimated, and not masked; :func:`twofour.pretrain.masked_decay_` shrinks what the mask drops; a last part of the
    training, about a sixth, is dense. The mask keeps the pattern with the largest sum of magnitudes in each 4x4 tile.

    The weight is packed in every forward pass, so that no change is missed, however it was made. The mask stays for
    ``freq`` steps; a step lies between two forward passes where an optimizer of torch has stepped, where the weight's
    version has changed, or where ``weight.cnt = 0`` was set, as in the toolkit. A loop that updates weights by other
    means, through ``.data`` for instance, marks its steps by ``weight.cnt = 0``.

    ``torch.compile`` breaks the graph at such a layer; ``fullgraph=True`` fails.

    The parameter ``weight`` has the toolkit's attributes: ``mask`` (bool), ``mode`` (``"sparse"``, or ``"dense"`` for
    an ordinary layer) and ``cnt`` (forward passes since the last step of the optimizer). ``x`` is ``[...,
    in_features]`` of float32, bfloat16 or float16; any ``in_features`` and ``out_features``.

    Args:
        freq: after how many steps of the optimizer a mask is chosen anew; at least 1.
        weight_gradient: as in :class:`twofour.pretrain.SparseLinear`.

    Attributes:
        mask: ``[out_features, in_features]`` of bool, part of ``state_dict()``; all False before the first forward
            pass.
        flip_rate: which part of the mask changed when it was last chosen anew, as a tensor; ``None`` before.

    Raises:
        ValueError: for an unknown ``weight_gradient``, a ``freq`` below 1; in the forward pass for a NaN in the weight,
            with its place.
        RuntimeError: where the last dimension of ``x`` is not ``in_features``.
        NotImplementedError: for other types, and where those of ``x`` and of the weight differ without autocast.
    """

    mask: torch.Tensor

    CARRIED = ("mode", "cnt", "mask")

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        freq: int = 40,
        weight_gradient: str = "mvue",
    ):
        self._estimator = weight_gradient_number(weight_gradient)
        if freq < 1:
            raise ValueError(f"freq must be at least 1, and is {freq}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.freq = freq
        self.weight_gradient = weight_gradient
        self.register_buffer("mask", torch.zeros(out_features, in_features, dtype=torch.bool, device=device))
        self.flip_rate: torch.Tensor | None = None
        self._steps = 0
        self._mode = "sparse"
        self._last_step: tuple[int, int] | None = None
        self._attach()

    def _attach(self) -> nn.Parameter:
        """The weight, with the toolkit's attributes."""
        weight = self.master
        if not hasattr(weight, "cnt"):
            # What takes the weight's place, as under torch.func.functional_call, is no step of an optimizer.
            weight.mode, weight.cnt, weight.mask = self._mode, int(self._steps > 0), self.mask
        self._mode = weight.mode
        return weight

    # Copies of parameters lack attributes, and versions and steps are those of this process.

    def __getstate__(self):
        return {**self.__dict__, "_last_step": None, "_mode": self._attach().mode}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._attach()

    def _apply(self, fn, recurse=True):
        mode = self._attach().mode
        super()._apply(fn, recurse)
        weight = self._attach()
        weight.mode, weight.mask = mode, self.mask
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if f"{prefix}mask" in state_dict and bool(self.mask.any()):
            # The mask stays until its next turn.
            self._steps = max(self._steps, 1)
        self._attach().mask = self.mask

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, freq={self.freq}, weight_gradient={self.weight_gradient!r}"

    @torch.no_grad()
    def _choose(self, weight: torch.Tensor) -> None:
        mask = masks.mask_of(operators.select(weight, _RULE), *weight.shape)
        if self._steps > 0:
            self.flip_rate = (mask ^ self.mask).float().mean()
        self.mask.copy_(mask)

    @torch.no_grad()
    def _pack(self, dtype: torch.dtype) -> Packed:
        """The weight as it is now under this step's mask, packed, in a type."""
        weight = self._attach()
        step = (weight._version, _optimizer_steps)
        if weight.cnt == 0 or self._steps == 0 or self._last_step not in (None, step):
            if self._steps == 0 or (self.training and self._steps % self.freq == 0):
                self._choose(weight.detach().to(dtype))
            self._steps += self.training
        self._last_step = step
        weight.cnt += self.training
        return pack_by_mask(weight.detach().to(dtype), masks.tiles_of(self.mask), True)

    @property
    def is_pruned(self) -> bool:
        """Whether the layer multiplies with a 2:4 weight: in the mode ``"sparse"``."""
        return self._attach().mode != "dense"

    def dense_weight(self) -> torch.Tensor:
        """The weight that the layer multiplies with, dense, without a gradient: with zeros where the mask keeps
        nothing, or whole in the mode ``"dense"``. Before the first forward pass the mask is the one that it will
        choose."""
        weight = self.master.detach()
        if not self.is_pruned:
            return weight.clone()
        mask = self.mask if bool(self.mask.any()) else masks.mask_of(operators.select(weight, _RULE), *weight.shape)
        return weight.masked_fill(~mask, 0)

    @traceable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._attach().mode == "dense":
            return F.linear(x, self.master, self.bias)
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else self.master.dtype
        x, bias = cast_for_autocast(x, self.bias)
        return master_linear(x, self.master, bias, _RULE, self._estimator, self._pack(dtype))
