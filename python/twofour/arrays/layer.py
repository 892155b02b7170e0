"""Pruning a linear layer by what is known of its inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _native
from .bytes import bytes_of, empty_like, is_tensor, returned, writable_bytes


class LayerInputs:
    """The inputs of a linear layer on calibration data, from which its weight is pruned.

    Takes ``4 * features ** 2`` bytes; twice that with the inputs of the dense model. Computed on the host, on all cores.

    Args:
        features: input features of the layer.

    >>> import numpy as np, twofour
    >>> inputs = twofour.LayerInputs(4)
    >>> inputs.add(np.array([[1, 1, 0, 2], [-3, -3, 1, 0], [2, 2, 5, 1]], np.float32))
    >>> pruned = inputs.prune(np.array([[1, 0.9, 0.1, 3]], np.float32), compensation=0)
    >>> np.array([pruned[0, :2].sum(), pruned[0, 3]]).round(1)  # one of two equal features stands for both
    array([1.9, 3.1], dtype=float32)
    """

    def __init__(self, features: int):
        self._features = features
        self._native = _native.LayerInputs(features)

    def add(self, inputs: Any, dense_inputs: Any = None) -> None:
        """Adds a batch of inputs.

        Args:
            inputs: an array or tensor ``[..., features]``: what enters the layer, in the model as it is pruned so far.
            dense_inputs: what enters it for the same tokens in the dense model. With it the layer makes up for the
                errors of the layers before it. Given with every batch or with none.

        Raises:
            ValueError: for another number of features, for a NaN or an infinity, with its place.
        """
        self._native.add(self._flat(inputs), None if dense_inputs is None else self._flat(dense_inputs))

    def prune(
        self,
        weight: Any,
        method: str = "alps",
        *,
        pattern: str = "2:4",
        swaps: int = 0,
        refit: int = 10,
        compensation: float = 0.5,
        dtype: str | None = None,
    ):
        """The pruned weight, with +0.0 in the place of what is not kept.

        Args:
            weight: an array or tensor ``[out_features, features]`` of float32, float16 or bfloat16. It is not changed.
            method: ``"magnitude"``, ``"wanda"``, ``"ria"``, ``"sparsegpt"`` or ``"alps"``, as in ``twofour prune``.
            pattern: N:M along rows.
            swaps: the most exchanges in a row of a kept for a pruned element of its group, after the method.
            refit: steps of refitting kept weights at the end; 0 for none.
            compensation: the share of the errors of earlier layers that the weight makes up for, from 0 to 1, where
                inputs of the dense model were added.
            dtype: what an array of unsigned integers holds, ``"bfloat16"`` for instance.

        Returns:
            an array or tensor of the same kind, shape and dtype, on the same device.

        Raises:
            ValueError: where no inputs were added; for a NaN, with its row and column; for another shape; for an
                unknown method or pattern.
            TypeError: for a weight of another dtype.
        """
        source = bytes_of(weight, dtype)
        rows, cols = source.matrix()
        if cols != self._features:
            raise ValueError(f"the weight has {cols} columns, and the inputs have {self._features} features")
        pruned = empty_like(source)
        self._native.prune(
            source.data, source.dtype, rows, pattern, method, swaps, refit, compensation, writable_bytes(pruned)
        )
        return returned(pruned, source)

    def low_rank(self, matrix: Any, rank: int | str):
        """Two factors whose product stands for a matrix with the least error on the layer's inputs.

        Of a weight, ``Wx`` becomes ``S(Qx)``: two layers in place of one. Of what pruning took away, ``W - pruned``,
        the product is EoRA's part beside the pruned weight.

        Args:
            matrix: an array or tensor ``[out_features, features]`` of floats. It is not changed.
            rank: the inner dimension, or a budget such as ``"25%"``: the share of the matrix's elements that the
                factors have. At most the smaller dimension.

        Returns:
            ``S``, ``[out_features, rank]``, and ``Q``, ``[rank, features]``: float32 arrays, or tensors on the device
            of the matrix.

        Raises:
            ValueError: where no inputs were added; for a rank below 1, another shape, or a NaN, with its row and column.

        >>> import numpy as np, twofour
        >>> inputs = twofour.LayerInputs(3)
        >>> inputs.add(np.eye(3, dtype=np.float32))
        >>> s, q = inputs.low_rank(np.array([[1, 2, 3], [-2, -4, -6]], np.float32), 1)
        >>> (s @ q).round(3)
        array([[ 1.,  2.,  3.],
               [-2., -4., -6.]], dtype=float32)
        """
        is_torch = is_tensor(matrix)
        values = matrix.detach().float().cpu().numpy() if is_torch else matrix
        values = np.ascontiguousarray(values, np.float32)
        if values.ndim != 2 or values.shape[1] != self._features:
            raise ValueError(f"a matrix [..., {self._features}] is required; the shape is {list(values.shape)}")
        rows = values.shape[0]
        rank = self._native.rank(str(rank), rows)
        factors = np.empty((rows, rank), np.float32), np.empty((rank, self._features), np.float32)
        self._native.low_rank(values.reshape(-1).view(np.uint8), rows, rank, *map(writable_bytes, factors))
        if not is_torch:
            return factors
        import torch

        left, right = (torch.from_numpy(factor).to(matrix.device) for factor in factors)
        return left, right

    def _flat(self, inputs: Any) -> np.ndarray:
        if is_tensor(inputs):
            inputs = inputs.detach().float().cpu().numpy()
        batch = np.ascontiguousarray(inputs, np.float32)
        if batch.ndim == 0 or batch.shape[-1] != self._features:
            shape = list(batch.shape)
            raise ValueError(f"inputs [..., {self._features}] are required; the shape is {shape}")
        return batch.reshape(-1).view(np.uint8)
