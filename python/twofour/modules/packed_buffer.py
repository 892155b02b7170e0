"""A packed weight as a buffer of a layer: memory that can be copied, and that no arithmetic has a meaning for."""

from __future__ import annotations

import functools

import torch
from torch.utils._pytree import tree_leaves, tree_map

#: In-place functions that write no numbers.
_IN_PLACE = {"copy_", "_foreach_copy_", "detach_", "requires_grad_", "share_memory_", "set_", "swap_"}
#: Functions with the tag of arithmetic that have none.
_HARMLESS = {"clone", "equal"}


class PackedBuffer(torch.Tensor):
    """The buffer. Its bytes can be copied to memory of the same kind; averaging, scaling or casting them, and taking
    them to another kind of device, is an error, since values and positions lie in it in the order of one device's
    kernels.

    Attributes:
        plain: the tensor, for kernels.
    """

    plain: torch.Tensor

    @staticmethod
    def of(packed: torch.Tensor) -> PackedBuffer:
        """The buffer that shares a tensor's memory."""
        buffer = packed.as_subclass(PackedBuffer)
        buffer.plain = packed
        return buffer

    def __reduce_ex__(self, protocol):
        return PackedBuffer.of, (self.plain,)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.Tensor.data.__set__:
            return _set_data(*args)
        name = getattr(func, "__name__", "")
        if getattr(func, "namespace", "aten") == "aten" and _computes(name):
            raise NotImplementedError(_refusal(name))
        inner, options = tree_map(plain, (args, kwargs))
        if name == "copy_":
            _expect_alike(name, *inner[:2])
            if inner[0].shape != inner[1].shape:
                raise NotImplementedError(_refusal(name))
        result = func(*inner, **options)
        if (
            not isinstance(result, torch.Tensor)
            or name.startswith("new_")
            or name.endswith("_like")
            or hasattr(func, "namespace")
        ):
            return result
        if name != "view":
            _expect_alike(
                name, next(arg.plain for arg in tree_leaves((args, kwargs)) if isinstance(arg, PackedBuffer)), result
            )
        return args[0] if result is inner[0] else cls.of(result)


def plain(tensor):
    """The tensor of a buffer; what else is given, as it is."""
    return tensor.plain if type(tensor) is PackedBuffer else tensor


def _set_data(buffer: PackedBuffer, value: torch.Tensor) -> None:
    value = plain(value)
    _expect_alike("data", buffer.plain, value)
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(buffer, value)
    buffer.plain = value


@functools.cache
def _computes(name: str) -> bool:
    """Whether a function of torch with that name takes elements for numbers, or writes numbers."""
    if name in _IN_PLACE or name in _HARMLESS:
        return False
    if name.startswith("_foreach_") or (name.endswith("_") and not name.startswith("__")):
        return True
    plain_name = name.strip("_")
    operators = (
        getattr(torch.ops.aten, each, None)
        for each in (plain_name, plain_name[1:] if plain_name[:1] in ("r", "i") else plain_name)
    )
    tags = {
        tag
        for packet in operators
        if packet
        for overload in packet.overloads()
        for tag in getattr(packet, overload).tags
    }
    return bool(tags & {torch.Tag.pointwise, torch.Tag.reduction})


def _expect_alike(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    """Raises:
    NotImplementedError: where a tensor does not hold the same kind of bytes as another one.
    """
    if one.dtype != other.dtype or one.device.type != other.device.type:
        raise NotImplementedError(_refusal(name))


def _refusal(name: str) -> str:
    return (
        f"{name} takes a packed 2:4 weight, a buffer of a twofour.Linear, QuantizedLinear or Int4Linear, for numbers, "
        f"but its bytes are values and "
        "positions in the order of a kernel. Such weights are frozen: leave buffers out of averages "
        "(AveragedModel(use_buffers=False) copies them), convert "
        "and move layers by layer.to(...), and compute with dense weights, layer.to_dense()"
    )
