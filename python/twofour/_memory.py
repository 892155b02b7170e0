"""What sparse tensors answer where torch asks for the memory of a dense one, which they have not."""

from __future__ import annotations

import torch

_ADVICE = "use to_dense(), or replace a layer whose weight it is by twofour.Linear.from_dense(layer), whose tensors are plain"


def advice() -> str:
    """What to do where an operator does not take a sparse tensor."""
    return _ADVICE


def _refusal(name: str):
    def refuse(tensor, *args, **kwargs):
        raise NotImplementedError(f"{name}: a {type(tensor).__name__} has no dense memory, and this asks for it; {_ADVICE}")

    return refuse


def functions(parts, set_data) -> dict:
    """Handlers for ``__torch_function__`` of a class of sparse tensors.

    Args:
        parts: of a tensor, the tensors that it is made of.
        set_data: of a tensor and a value, what ``tensor.data = value`` does.
    """

    def share_memory_(tensor):
        for part in parts(tensor):
            part.share_memory_()
        return tensor

    # torch.compile asks for the storage, which torch itself says is not allocated.
    names = ("data_ptr", "numpy", "__dlpack__")
    return {getattr(torch.Tensor, name): _refusal(name) for name in names} | {
        torch.Tensor.data.__set__: set_data,
        torch.Tensor.share_memory_: share_memory_,
        torch.Tensor.is_shared: lambda tensor: all(part.is_shared() for part in parts(tensor)),
    }


def replace_contents(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Gives a sparse tensor the contents of another one of its class, of any shape, type and device, without writing to memory: ``.data = ``."""
    with torch._C.DisableTorchFunctionSubclass():
        torch._C.TensorBase.data.__set__(tensor, new)
    replace_parts(tensor, new)


def replace_parts(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Gives a sparse tensor the parts of another one of its class, shape, type and device."""
    kept = {name: tensor.__dict__[name] for name in ("_is_param",) if name in tensor.__dict__}
    tensor.__dict__.clear()
    tensor.__dict__.update(new.__dict__ | kept)
