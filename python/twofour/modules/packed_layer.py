"""What layers with a packed weight have in common: moving, saving and loading it."""

from __future__ import annotations

import contextlib
import contextvars

import torch

from ..arrays.compression import Compressed
from . import registration
from .packed_buffer import PackedBuffer, plain
from .parallel import FrozenBuffers

#: Whether state dicts hold the layer itself under ``weight``, in the place of its canonical parts.
_DEFERRED = contextvars.ContextVar("twofour_deferred", default=False)


@contextlib.contextmanager
def deferred_weights():
    """Inside, ``state_dict`` puts each layer with a packed weight itself under the name of its weight, so that no
    canonical copies are made."""
    token = _DEFERRED.set(True)
    try:
        yield
    finally:
        _DEFERRED.reset(token)


class PackedLayer(FrozenBuffers):
    """A layer that holds its weight ``[out_features, in_features]`` once: packed, in the layout of the device's
    kernels. State dicts and pickles hold the canonical form, which is made when it is asked for.

    A class says how its weight is packed (:meth:`_pack`), what it is where it was packed (:meth:`canonical`), and what
    moving does to it (:meth:`_moved`).

    Attributes:
        PACKED: the name of the buffer with the packed weight.
        PARTS: the names of the canonical parts in state dicts.
        TAKES_DENSE: whether a state dict may have a dense ``weight`` instead.
    """

    PACKED = "packed"
    PARTS: tuple[str, ...] = ("weight_values", "weight_meta")
    TAKES_DENSE = False

    def canonical(self) -> tuple[torch.Tensor, ...]:
        """The parts of the canonical form."""
        raise NotImplementedError

    def _pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """The packed weight of canonical parts, on their device."""
        raise NotImplementedError

    def _checked(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Parts of a state dict on the device of the layer, or where they are if that is ``meta``.

        Raises:
            RuntimeError: where they are not those of a weight of this layer's shape.
        """
        raise NotImplementedError

    def _moved(self, fn) -> torch.Tensor | None:
        """The packed weight after a function that moves or converts tensors; the layer's own where it stays as it
        is."""
        raise NotImplementedError

    @property
    def _packed(self) -> torch.Tensor | None:
        return plain(self._buffers[self.PACKED])

    def _set_packed(self, packed: torch.Tensor) -> None:
        self._buffers[self.PACKED] = PackedBuffer.of(packed)

    def _take(self, *parts: torch.Tensor) -> None:
        """Takes canonical parts for the layer's weight."""
        self._set_packed(self._pack(*parts))

    @property
    def weight_values(self) -> torch.Tensor:
        """The kept values in canonical form, a copy where the weight is packed."""
        return self.canonical()[0]

    @property
    def weight_meta(self) -> torch.Tensor:
        """The metadata in canonical form, a copy where the weight is packed."""
        return self.canonical()[1]

    def compressed(self) -> Compressed:
        """The weight as files hold it."""
        return Compressed(*self.canonical(), (self.out_features, self.in_features), self.stored_dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn, recurse=True):
        before, packed = self._buffers[self.PACKED], self._moved(fn)
        # The base class leaves it alone.
        self._buffers[self.PACKED] = None
        try:
            super()._apply(fn, recurse)
        except BaseException:
            self._buffers[self.PACKED] = before
            raise
        if packed is plain(before):
            self._buffers[self.PACKED] = before
        elif packed is not None:
            self._set_packed(packed)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if _DEFERRED.get():
            for part in ("weight_values", "weight_meta", "weight_scales"):
                destination.pop(prefix + part, None)
            destination[prefix + "weight"] = self
        elif self._buffers[self.PACKED] is not None:
            destination.update(zip((prefix + part for part in self.PARTS), self.canonical(), strict=True))

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        parts = {name: state_dict[prefix + name] for name in self.PARTS if prefix + name in state_dict}
        dense = state_dict.get(prefix + "weight") if self.TAKES_DENSE else None
        # Those of a layer that is not packed yet; the base class would copy into them.
        own = {name: self._buffers[name] for name in self.PARTS if name in self._buffers}
        self._buffers.update(dict.fromkeys(own))
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            self._buffers.update(own)
        taken = {prefix + name for name in (*parts, *(["weight"] if dense is not None else []))}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in taken]
        try:
            if dense is not None:
                self._load_dense(dense)
            elif len(parts) == len(self.PARTS):
                self._take(*self._checked(*parts.values()))
            else:
                missing_keys.extend(prefix + name for name in self.PARTS if name not in parts)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            error_msgs.append(f"{prefix}weight: {error}")

    def __getstate__(self):
        buffers = {**self._buffers, self.PACKED: None, **dict(zip(self.PARTS, self.canonical(), strict=True))}
        return {**super().__getstate__(), "_buffers": buffers}

    def __setstate__(self, state):
        registration.with_transformers()
        # Earlier versions had the parts of integers beside the buffers.
        parts = state.pop("_canonical", None)
        super().__setstate__(state)
        if parts is None:
            parts = [self._buffers.pop(name) for name in self.PARTS]
        self._take(*parts)
