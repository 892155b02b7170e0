"""Masks and test data, under the names of ``torchao.sparsity.utils``."""

from __future__ import annotations

import torch

from ..modules.wanda import PerChannelNormObserver
from ..operators.magnitude import keep_largest, two_largest

__all__ = ["PerChannelNormObserver", "create_semi_structured_tensor", "mask_creator"]


@torch.no_grad()
def mask_creator(tensor: torch.Tensor, N: int = 2, M: int = 4) -> torch.Tensor:
    """The mask that keeps the ``N`` largest magnitudes of every ``M`` consecutive elements.

    Args:
        tensor: any shape, taken row by row; the number of elements is a multiple of ``M``.
        N: kept elements of a group.
        M: elements of a group.

    Returns:
        zeros and ones, of the shape and type of ``tensor``. Ties go to the earlier element.

    Raises:
        ValueError: where the number of elements is not a multiple of ``M``; unless ``0 <= N <= M`` and ``M >= 1``.
    """
    if M < 1 or not 0 <= N <= M:
        raise ValueError(f"N must lie between 0 and M, and M be at least 1; they are N={N}, M={M}")
    if tensor.numel() % M:
        raise ValueError(
            f"the tensor has {tensor.numel()} elements, shape {tuple(tensor.shape)}, which is not a multiple of M={M}"
        )
    groups = tensor.detach().reshape(-1, M)
    kept = two_largest(groups) if (N, M) == (2, 4) else keep_largest(groups.abs(), N)
    return kept.to(tensor.dtype).reshape(tensor.shape)


def create_semi_structured_tensor(
    r: int, c: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> torch.Tensor:
    """A random dense tensor ``[r, c]`` that is 2:4: of each pair of elements one is zero, the other uniform in ``[1,
    2)``; 1 for integers.

    Args:
        r: rows.
        c: columns, an even number.
        dtype: the type.
        device: the device; torch's default one otherwise.

    Raises:
        ValueError: where ``c`` is odd.
    """
    if c % 2:
        raise ValueError(f"c must be even: elements come in pairs; it is {c}")
    second = torch.randint(2, (r, c // 2, 1), device=device)
    # Rounding to a short type must not give 2.
    values = 1 + torch.rand((r, c // 2, 1), device=device) * 0.99
    pairs = torch.cat((values * (1 - second), values * second), -1)
    return pairs.reshape(r, c).to(dtype)
