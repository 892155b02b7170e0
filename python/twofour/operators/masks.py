"""Masks in tiles, as the operators have them, and as tensors of bool."""

import torch


def tiles_of(mask: torch.Tensor) -> torch.Tensor:
    """A mask ``[rows, cols]`` of bool in tiles: an int16 for each 4x4 tile, bit ``4 * row + column`` set where it keeps
    the element."""
    rows, cols = mask.shape
    padded = torch.nn.functional.pad(mask, (0, -cols % 4, 0, -rows % 4))
    tiles = (
        padded.view(-(-rows // 4), 4, -(-cols // 4), 4).permute(0, 2, 1, 3).reshape(-(-rows // 4), -(-cols // 4), 16)
    )
    weights = 1 << torch.arange(16, device=mask.device, dtype=torch.int32)
    return (tiles.to(torch.int32) * weights).sum(-1, dtype=torch.int32).to(torch.int16)


def mask_of(tiles: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of :func:`tiles_of` for a mask of that shape."""
    bits = torch.arange(16, device=tiles.device, dtype=torch.int32)
    kept = (tiles.to(torch.int32)[..., None] >> bits & 1).bool().view(*tiles.shape, 4, 4)
    return kept.permute(0, 2, 1, 3).reshape(tiles.shape[0] * 4, tiles.shape[1] * 4)[:rows, :cols].contiguous()
