"""What sparse tensors answer where torch asks for the memory of a dense one, which they have not."""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler

import torch
from torch import nn

_ADVICE = (
    "use to_dense(), or replace a layer whose weight it is by twofour.Linear.from_dense(layer), whose tensors are plain"
)


def advice() -> str:
    """What to do where an operator does not take a sparse tensor."""
    return _ADVICE


def _refusal(name: str):
    def refuse(tensor, *args, **kwargs):
        raise RuntimeError(f"{name}: a {type(tensor).__name__} has no dense memory, and this asks for it; {_ADVICE}")

    return refuse


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The plain tensors that a sparse tensor of this package is made of, or ``None`` for another one."""
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if type(tensor) in _CLASSES else None


#: The classes of sparse tensors.
_CLASSES: set[type] = set()


def functions(cls: type, set_data) -> dict:
    """Handlers for ``__torch_function__`` of a class of sparse tensors and its subclasses.

    Args:
        cls: the class.
        set_data: of a tensor and a value, what ``tensor.data = value`` does.
    """
    _CLASSES.update({cls, *cls.__subclasses__()})

    def share_memory_(tensor):
        for part in parts_of(tensor):
            part.share_memory_()
        return tensor

    def is_floating_point(tensor):
        # FullyShardedDataParallel asks this first of what it is about to flatten.
        if not torch.compiler.is_compiling() and sys._getframe(2).f_code.co_name == "_validate_tensors_to_flatten":
            raise NotImplementedError(
                f"FullyShardedDataParallel cannot flatten a {type(tensor).__name__}, a weight that is sparse; {_ADVICE}"
            )
        return tensor.dtype.is_floating_point

    # Not untyped_storage: torch.compile compares storages, and reading one is an error of torch's.
    names = ("data_ptr", "numpy", "storage", "__dlpack__")
    return {getattr(torch.Tensor, name): _refusal(name) for name in names} | {
        torch.Tensor.data.__set__: set_data,
        torch.Tensor.is_floating_point: is_floating_point,
        torch.Tensor.share_memory_: share_memory_,
        torch.Tensor.is_shared: lambda tensor: all(part.is_shared() for part in parts_of(tensor)),
    }


def replace_contents(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Gives a sparse tensor the contents of another one of its class, of any shape, type and device, without writing to
    memory: ``.data = ``."""
    with torch._C.DisableTorchFunctionSubclass():
        torch._C.TensorBase.data.__set__(tensor, new)
    replace_parts(tensor, new)


def replace_parts(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Gives a sparse tensor the parts of another one of its class, shape, type and device."""
    kept = {name: tensor.__dict__[name] for name in ("_is_param",) if name in tensor.__dict__}
    # Before anything is removed, since a tensor may be assigned to itself.
    parts = new.__dict__ | kept
    tensor.__dict__.clear()
    tensor.__dict__.update(parts)


def _restored(cls: type, state: dict) -> nn.Module:
    layer = cls.__new__(cls)
    nn.Module.__setstate__(layer, state)
    return layer


def share_between_processes(cls: type) -> type:
    """Lets processes of one machine hand over the layers of a class as they are, packed and in memory that both see.
    Pickles for files and other machines have the canonical form."""
    ForkingPickler.register(cls, lambda layer: (_restored, (cls, nn.Module.__getstate__(layer))))
    return cls
