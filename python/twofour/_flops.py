"""FLOPs for ``torch.utils.flop_counter``: those of the dense GEMM, so that a model counts the same before and after it is made sparse.

The kernels compute half of them. Products with block-sparse weights count the GEMMs over the blocks that are stored.
"""

from __future__ import annotations

import math

import torch
from torch.utils.flop_counter import register_flop_formula

#: The operators that multiply activations, and where among their arguments the features of the result are.
_FEATURES = {
    "linear": 2,
    "linear_bias": 3,
    "linear_i8": 2,
    "linear_quantized": 3,
    "linear_quantized_bias": 4,
    "linear_int4": 2,
    "linear_int4_bias": 3,
    "linear_float8": 5,
    "input_gradient": 2,
}


def _formula(position: int):
    # Tensors are given as their shapes.
    return lambda *args, **kwargs: 2 * math.prod(args[0]) * args[position]


for _name, _position in _FEATURES.items():
    register_flop_formula(getattr(torch.ops.twofour, _name))(_formula(_position))


@register_flop_formula(torch.ops.twofour.sampled_weight_gradient)
def _sampled_weight_gradient(dy, x, *args, **kwargs) -> int:
    return 2 * math.prod(dy) * x[-1]
