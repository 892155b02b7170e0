"""Decay of what a mask drops."""

from __future__ import annotations

import torch
from torch import nn

from ..modules.conversion import is_sharded
from ..modules.readers import CarriesAttributes


@torch.no_grad()
def masked_add_(grad: torch.Tensor, p_data: torch.Tensor, p_mask: torch.Tensor, alpha: float = 0) -> torch.Tensor:
    """Adds ``alpha * p`` to a gradient, in place, wherever the mask keeps nothing: masked decay.

    It belongs after unscaling and clipping and before the optimizer's step. Dropped elements that do not matter shrink,
    so that the mask settles. (Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024; under
    plain SGD it is SR-STE, Zhou et al., ICLR 2021.) The toolkit requires equal strides; any will do here.

    Args:
        grad: the gradient, of any floating-point type.
        p_data: the weight, of the same shape.
        p_mask: what is kept, of the same shape; bool, or of another type where zero means dropped.
        alpha: the strength; 0 adds nothing.

    Returns:
        ``grad``.

    Raises:
        ValueError: where the shapes differ.
    """
    if not grad.shape == p_data.shape == p_mask.shape:
        raise ValueError(
            f"masked_add_: gradient, weight and mask have shapes {tuple(grad.shape)}, {tuple(p_data.shape)} and "
            f"{tuple(p_mask.shape)}; all "
            "must be the same"
        )
    if alpha == 0:
        return grad
    return grad.add_(p_data.masked_fill(p_mask.bool(), 0), alpha=alpha)


def masked_decay_(model: nn.Module, alpha: float) -> None:
    """Applies :func:`masked_add_` to the gradient of every weight that has a mask and is not in the mode ``"dense"``:
    those of :class:`twofour.pretrain.SparseLinearTranspose`. To be called once before each step of the optimizer.

    Args:
        model: the model.
        alpha: the strength.

    Raises:
        RuntimeError: for a layer whose weight is no parameter, so that its mask is not found.
    """
    for name, module in model.named_modules():
        if isinstance(module, CarriesAttributes) and "mode" in module.CARRIED and "weight" not in module._parameters:
            raise RuntimeError(
                f"the weight of {name or 'the model'} is no parameter, so that masked_decay_ does not find its mask: "
                "FullyShardedDataParallel with flat parameters or a parametrization replaced it; use fully_shard, or "
                "use_orig_params=True"
            )
    for p in model.parameters():
        if (
            isinstance(getattr(p, "mask", None), torch.Tensor)
            and getattr(p, "mode", "dense") == "sparse"
            and p.grad is not None
        ):
            masked_add_(p.grad, p.data, _sharded_as(p, p.mask), alpha)
            p.cnt = 0


def _sharded_as(p: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A whole mask, which all ranks have, sharded as a parameter is."""
    if not is_sharded(p):
        return mask
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(mask, p.device_mesh, p.placements)
