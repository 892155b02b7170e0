"""S-STE: training with a soft threshold."""

from __future__ import annotations

import torch
from torch import nn

from .. import operators
from ..modules.conversion import SparseLayer
from ..modules.readers import ServesReaders
from ..modules.tracing import traceable
from ..operators.master import cast_for_autocast, master_linear, weight_gradient_number
from ..operators.packed import Packed

_RULE = operators.rule_number("soft-threshold")


class SparseLinear(ServesReaders, SparseLayer, nn.Linear):
    """A linear layer with the weight ``scale * S(W)``: ``S`` keeps the two largest magnitudes of each group of four,
    each less the third largest.

    S-STE (Hu et al., "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training", NeurIPS 2024).
    ``scale`` brings ``S(W)`` nearest to ``W``; it is computed from the weight at the first forward pass, or by
    :meth:`init_scale`, and then kept. The gradient of the weight is that of ``scale * S(W)`` (straight-through), not
    multiplied by the scale. Forward pass and input gradient are sparse GEMMs.

    ``x`` is ``[..., in_features]`` of float32, bfloat16 or float16; any ``in_features`` and ``out_features``.

    ``torch.compile(fullgraph=True)`` takes it: once with the first call, which computes the scale, once without, and
    never again.

    Args:
        weight_gradient: ``"mvue"`` replaces the output gradient by its unbiased 2:4 estimate of least variance along
            tokens, so that the weight gradient is a sparse GEMM, too; ``"mvue-approximate"`` by the estimate of
            :func:`twofour.pretrain.MVUE24_approx`; ``"dense"`` by nothing. The toolkit's layer computes the input
            gradient from an estimate of the weight, which the paper found harmful.

    Attributes:
        scale: a tensor of float32 without dimensions; 0 until it is computed. It is part of ``state_dict()``.

    Raises:
        ValueError: for an unknown ``weight_gradient``; in the forward pass for a NaN or an infinity in the weight, with
            its place.
        RuntimeError: where the last dimension of ``x`` is not ``in_features``.
        NotImplementedError: for other types, and where those of ``x`` and of the weight differ without autocast.
    """

    scale: torch.Tensor

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, weight_gradient: str = "mvue"):
        self._estimator = weight_gradient_number(weight_gradient)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.weight_gradient = weight_gradient
        self._has_scale = False
        self.register_buffer("scale", torch.zeros((), device=device))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight_gradient={self.weight_gradient!r}"

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if f"{prefix}scale" in state_dict:
            self._has_scale = bool(self.scale != 0)

    @torch.no_grad()
    def init_scale(self) -> None:
        """Computes the scale from the weight as it is now: ``<W, S(W)> / <S(W), S(W)>``; 1 where nothing is left of the
        weight.

        The first forward pass does it unless it was done. The scale of every step makes masks flip without end, so it
        is kept.
        """
        self.scale.copy_(operators.soft_threshold_scale(self.master.detach()))
        self._has_scale = True

    @torch.no_grad()
    def get_sparse_weights(self) -> torch.Tensor:
        """The weight that the layer multiplies with, dense with zeros, without a gradient: ``[out_features,
        in_features]``."""
        if not self._has_scale:
            self.init_scale()
        return self.dense_weight()

    def dense_weight(self) -> torch.Tensor:
        """The weight that the layer multiplies with, dense with zeros, without a gradient. A scale that was not
        computed yet stays so."""
        weight = self.master.detach()
        scale = self.scale if self._has_scale else operators.soft_threshold_scale(weight)
        return operators.estimated((weight * scale).to(weight.dtype), operators.ESTIMATORS["soft-threshold"])

    def _scaled(self, weight: torch.Tensor) -> torch.Tensor:
        # S(scale * W) is scale * S(W), and the scale stays on the device.
        return (weight.detach() * self.scale).to(weight.dtype)

    @traceable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._has_scale:
            self.init_scale()
        x, scaled, bias = cast_for_autocast(x, self._scaled(self.master), self.bias)
        forward, _, _ = operators.pack(scaled, _RULE, 1.0, False, False)
        return master_linear(x, self.master, bias, _RULE, self._estimator, Packed(*scaled.shape, forward))
