"""STEP's linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .. import operators
from ..modules.conversion import SparseLayer
from ..modules.readers import CarriesAttributes
from ..modules.tracing import traceable
from ..operators import masks
from ..operators.master import cast_for_autocast, master_linear

_RULE = operators.rule_number("magnitude")


class STEPLinear(CarriesAttributes, SparseLayer, nn.Linear):
    """A linear layer that trains dense until :class:`twofour.pretrain.AdamW_STEP` freezes its variances, and then with
    its two largest magnitudes of each group of four.

    STEP (Lu et al., "STEP: Learning N:M Structured Sparsity Masks from Scratch with Precondition", ICML 2023). The
    parameter ``weight`` has the attribute ``mask``: ``"dense"``, or ``"sparse"`` once the optimizer has switched. In
    evaluation the layer is always sparse. Gradients pass straight through: pruned elements have one, too. Sparse
    forward passes and input gradients are sparse GEMMs.

    ``x`` is ``[..., in_features]`` of float32, bfloat16 or float16; any ``in_features`` and ``out_features``.

    Raises:
        ValueError: in a sparse forward pass for a NaN in the weight, with its place.
        RuntimeError: where the last dimension of ``x`` is not ``in_features``.
        NotImplementedError: in a sparse forward pass for other types.
    """

    CARRIED = ("mask",)

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.master.mask = self._phase = "dense"

    def _current_phase(self) -> str:
        """The weight's ``mask``. A tensor in its place without one, as of ``torch.func.functional_call``, is in the
        phase that was last seen."""
        self._phase = getattr(self.master, "mask", self._phase)
        return self._phase

    def read_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.training and self._current_phase() == "dense" else super().read_weight(weight)

    # Copies of parameters lack attributes.

    def __getstate__(self):
        return {**self.__dict__, "_phase": self._current_phase()}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.master.mask = self._phase

    def dense_weight(self) -> torch.Tensor:
        """The weight that the layer multiplies with in evaluation: its two largest magnitudes of each group of four,
        dense with zeros."""
        weight = self.master.detach()
        return weight.masked_fill(~masks.mask_of(operators.select(weight, _RULE), *weight.shape), 0)

    @traceable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._current_phase() == "dense" and self.training:
            return F.linear(x, self.master, self.bias)
        x, weight, bias = cast_for_autocast(x, self.master, self.bias)
        return master_linear(x, weight, bias, _RULE)
