"""``DistributedDataParallel`` over models with sparse weights.

Frozen weights are the first rank's, and are sent once, when the model is wrapped. torch would send buffers before every
forward pass, and cannot send sparse tensors.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..tensor import memory
from .packed_buffer import plain


class FrozenBuffers:
    """A layer whose buffers, but for those that a user adds, do not change in training.

    Attributes:
        FROZEN_BUFFERS: their names.
    """

    FROZEN_BUFFERS: tuple[str, ...] = ()

    def register_parameter(self, name, param):
        if name == "weight":
            kind = type(self).__name__
            raise TypeError(
                f"the weight of a {kind} is packed and is no parameter, so it cannot be tied or set: make a new layer, "
                f"{kind}.from_dense, or load a state dict"
            )
        super().register_parameter(name, param)


def _frozen(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """The frozen weights of a model, by name: of each the plain tensors that it is made of.

    Raises:
        NotImplementedError: for a sparse weight that needs a gradient.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{module_name}." if module_name else ""
        if isinstance(module, FrozenBuffers):
            found |= {
                prefix + name: [plain(module._buffers[name])]
                for name in module.FROZEN_BUFFERS
                if module._buffers.get(name) is not None
            }
        for name, parameter in module._parameters.items():
            parts = None if parameter is None else memory.parts_of(parameter)
            if parts is None:
                continue
            if parameter.requires_grad:
                raise NotImplementedError(
                    f"{prefix}{name} is a sparse tensor that needs a gradient, which DistributedDataParallel cannot "
                    f"sum over ranks: freeze it, or "
                    "train a twofour.sparsity.training.SemiSparseLinear; twofour.Linear holds a frozen weight"
                )
            found[prefix + name] = parts
    return found


def _when_registered(parent: nn.Module, name: str, model: nn.Module) -> None:
    if name != "module" or not isinstance(parent, DistributedDataParallel):
        return
    frozen = _frozen(model)
    if not frozen:
        return
    parent.parameters_to_ignore = parent.parameters_to_ignore | set(frozen)
    tensors = {id(part): part.detach() for parts in frozen.values() for part in parts if part.numel()}
    # Not every backend sends every dtype, but all send bytes.
    as_bytes = [part.view(-1).view(torch.uint8) for part in tensors.values()]
    dist._verify_params_across_processes(parent.process_group, as_bytes)
    dist._broadcast_coalesced(parent.process_group, as_bytes, 250 << 20, 0)


if dist.is_available():
    register_module_module_registration_hook(_when_registered)
