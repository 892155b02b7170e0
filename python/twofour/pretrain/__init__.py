"""Pre-training with 2:4 weights, under the names of the 2by4-pretrain toolkit.

=======================================================  ===============================================================
:class:`SparseLinear`                                    S-STE: soft threshold with a frozen scale
:class:`SparseLinearTranspose`, :func:`masked_decay_`    FST: transposable masks and masked decay
:class:`STEPLinear`, :class:`AdamW_STEP`                 STEP: dense until variances have settled, then sparse
:class:`TransposableSparse`, :func:`sparse24`,           what these are made of
:func:`soft_threshold24`, :func:`MVUE24_approx`,
:func:`masked_add_`, :class:`GELUglu`,
:func:`to_sparse_semi_structured`
=======================================================  ===============================================================

Names that end in ``_torch`` or ``_triton`` are the toolkit's names of two implementations, and are the same function
here.
"""

from .adamw_step import AdamW_STEP
from .compress import to_sparse_semi_structured
from .decay import masked_add_, masked_decay_
from .estimators import MVUE24_approx, soft_threshold24, sparse24
from .fst import SparseLinearTranspose
from .geglu import GELUglu
from .sste import SparseLinear
from .step_linear import STEPLinear
from .transposable import TransposableSparse

sparse24_torch = sparse24_triton = sparse24
soft_threshold24_torch = soft_threshold24_triton = soft_threshold24
MVUE24_approx_torch = MVUE24_approx_triton = MVUE24_approx

__all__ = [
    "AdamW_STEP",
    "GELUglu",
    "MVUE24_approx",
    "MVUE24_approx_torch",
    "MVUE24_approx_triton",
    "STEPLinear",
    "SparseLinear",
    "SparseLinearTranspose",
    "TransposableSparse",
    "masked_add_",
    "masked_decay_",
    "soft_threshold24",
    "soft_threshold24_torch",
    "soft_threshold24_triton",
    "sparse24",
    "sparse24_torch",
    "sparse24_triton",
    "to_sparse_semi_structured",
]
