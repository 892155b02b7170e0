"""2:4 sparse tensors, under the names of ``torch.sparse``."""

from .modules import sparse_weight as _layers  # An nn.Linear may have such a weight.
from .tensor.conversion import to_sparse_semi_structured
from .tensor.semi_structured import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

__all__ = [
    "SparseSemiStructuredTensor",
    "SparseSemiStructuredTensorCUSPARSELT",
    "SparseSemiStructuredTensorCUTLASS",
    "to_sparse_semi_structured",
]
