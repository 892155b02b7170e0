"""``torch._scaled_mm`` with 2:4 matrices of 8-bit floats."""

from __future__ import annotations

import torch

from .. import operators
from .packed import Packed

#: The types, by torch's number of each.
FLOAT8 = operators.FLOAT8

#: The types that GEMMs of 8-bit floats give; others are rounded afterwards.
_RESULTS = operators.TYPES


def saturated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in a type of 8-bit floats; those that it does not reach become its largest."""
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


def scaled_product(
    x: torch.Tensor,
    weight: Packed,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``(x @ W.T) * scale_x * scale_w + bias``, with sums in float32.

    Args:
        x: ``[tokens, in_features]`` of float8_e4m3fn or float8_e5m2.
        weight: ``W``, ``[out_features, in_features]`` of either type.
        scale_x: float32: one number, or one for each token.
        scale_w: float32: one number, or one for each feature.
        bias: ``[out_features]``, or ``None``.
        out_dtype: bfloat16, float16, float32 or an 8-bit float, to which values beyond its range are saturated.

    Raises:
        NotImplementedError: for other types, and for a matrix that is packed along its columns alone.
        RuntimeError: for shapes that do not fit.
    """
    for tensor, what in ((x, "the dense operand"), (weight, "the sparse operand")):
        if tensor.dtype not in FLOAT8:
            raise NotImplementedError(
                f"_scaled_mm: {what} has dtype {tensor.dtype}; torch.float8_e4m3fn or torch.float8_e5m2 is required"
            )
    if weight.forward is None:
        raise NotImplementedError(
            "_scaled_mm: the sparse operand is packed along the other dimension; make it of the matrix whose rows the "
            "product sums along"
        )
    if x.shape[-1] != weight.cols:
        raise RuntimeError(
            f"_scaled_mm: shapes cannot be multiplied: {tuple(x.shape)} and {(weight.cols, weight.rows)}"
        )
    if out_dtype not in _RESULTS and out_dtype not in FLOAT8:
        raise NotImplementedError(
            f"_scaled_mm: out_dtype {out_dtype} is not supported; use bfloat16, float16, float32 or an 8-bit float"
        )
    for scale, count, what in (
        (scale_x, x.shape[0], "row of the dense operand"),
        (scale_w, weight.rows, "row of the sparse operand"),
    ):
        if scale.dtype is not torch.float32 or scale.numel() not in (1, count):
            raise RuntimeError(
                f"_scaled_mm: scales must be float32, one for the tensor or one for each {what} ({count}); these are "
                f"{scale.numel()} of {scale.dtype}"
            )
    scale_x, scale_w = scale_x.reshape(-1), scale_w.reshape(-1)
    none = x.new_empty((0,), dtype=torch.float32)
    if scale_x.numel() == 1:
        scales, token_scales = scale_x * scale_w.expand(weight.rows), none
    else:
        scales, token_scales = scale_w.expand(weight.rows), scale_x
    computed = out_dtype if out_dtype in _RESULTS else torch.float32
    bias = none if bias is None else bias.to(computed)
    y = operators.linear_float8(x, weight.forward, scales, token_scales, bias, weight.rows, _RESULTS[computed])
    return y if computed is out_dtype else saturated(y, out_dtype)
