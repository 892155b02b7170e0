"""torch's CUTLASS layouts of a 2:4 weight, made from and turned into the canonical form.

The metadata's order is described in CUTLASS's ``ReorderedMeta``; the bitmask's in torch's
``_compute_compressed_swizzled_bitmask``.
"""

import torch


def _destinations(rows: int, words: int, meta_dtype: torch.dtype, device) -> torch.Tensor:
    """Where each metadata element ``[rows, words]`` lies in torch's order."""
    group, interweave = (32, 4) if meta_dtype == torch.int16 else (16, 2)
    row = torch.arange(rows, device=device)[:, None].expand(rows, words)
    col = torch.arange(words, device=device)[None, :].expand(rows, words)
    dst_row = row // group * group + row % 8 * interweave + row % group // 8
    top_right = (dst_row % 2 == 0) & (col % 2 == 1)
    bottom_left = (dst_row % 2 == 1) & (col % 2 == 0)
    dst_row = dst_row + top_right.long() - bottom_left.long()
    dst_col = col - top_right.long() + bottom_left.long()
    return (dst_col // 2 * rows * 2 + dst_row * 2 + dst_col % 2).reshape(-1)


def _rows_multiple(dtype: torch.dtype) -> int:
    return 16 if dtype == torch.int8 else 32


def meta_to_torch(meta: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Canonical metadata ``[rows, words]`` of int32 in torch's order: int16, or int32 for a weight of int8.

    Raises:
        RuntimeError: for a shape that torch's order cannot hold.
    """
    rows = meta.shape[0]
    meta_dtype = torch.int32 if dtype == torch.int8 else torch.int16
    per_word = 8 if dtype == torch.int8 else 4
    if rows % _rows_multiple(dtype) or cols % (4 * per_word * 2):
        raise RuntimeError(
            f"torch's metadata requires rows to be a multiple of {_rows_multiple(dtype)} and columns of "
            f"{8 * per_word}; the shape is "
            f"({rows}, {cols})"
        )
    words = cols // 4 // per_word
    source = meta.contiguous().view(meta_dtype)[:, :words].reshape(-1)
    out = torch.empty_like(source)
    out[_destinations(rows, words, meta_dtype, meta.device)] = source
    return out.view(rows, words)


def meta_from_torch(meta: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`meta_to_torch`."""
    rows, words = meta.shape
    source = meta.reshape(-1)[_destinations(rows, words, meta.dtype, meta.device)].view(rows, words)
    return source.contiguous().view(torch.int32)


def bitmask_to_torch(tiles: torch.Tensor) -> torch.Tensor:
    """Tiles as torch's bitmask ``[rows / 8, cols / 8, 8]`` of bytes: the four tiles of 8x8 elements, 16 bits each.

    Raises:
        RuntimeError: where a side of the matrix is not a multiple of 8.
    """
    down, across = tiles.shape
    if down % 2 or across % 2:
        raise RuntimeError("torch's bitmask requires both sides of the matrix to be multiples of 8")
    blocks = tiles.view(down // 2, 2, across // 2, 2).permute(0, 2, 1, 3).contiguous()
    return blocks.view(torch.uint8).view(down // 2, across // 2, 8)


def bitmask_from_torch(bitmask: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`bitmask_to_torch`."""
    down, across, _ = bitmask.shape
    blocks = bitmask.contiguous().view(torch.int16).view(down, across, 2, 2)
    return blocks.permute(0, 2, 1, 3).reshape(down * 2, across * 2)
