"""Adapters of peft on layers of integers: LoRA beside a frozen 2:4 weight in int8 or int4, as QLoRA has it beside dense
ones.

Layers of floats, :class:`twofour.Linear` and ``nn.Linear`` with a sparse weight, peft adapts without this module. An
adapter is merged by ``twofour merge``, which keeps the zeros of a weight of floats::

    from twofour import adapters
    model = peft.get_peft_model(model, adapters.lora_config(target_modules=["q_proj", "v_proj"], r=16))
    ...
    model.save_pretrained("adapter")
    model = adapters.load_lora(base, "adapter")
"""

from __future__ import annotations

import os

import peft
import torch
from peft.tuners.lora import layer as lora

from .modules.integers import IntegerLayer

__all__ = ["LoraIntegerLinear", "load_lora", "lora_config"]


class LoraIntegerLinear(lora.Linear):
    """LoRA of a :class:`twofour.Int4Linear` or a :class:`twofour.quantization.QuantizedLinear`, which stays as it is.

    Raises:
        ValueError: in ``merge``, since a sum with integers would have to be rounded and is not 2:4.
        NotImplementedError: for DoRA, which normalizes that sum.
    """

    def __init__(self, base_layer, adapter_name, config=None, **kwargs):
        if config is not None and config.use_dora:
            raise NotImplementedError(f"DoRA is not supported on a {type(base_layer).__name__}: leave use_dora out")
        super().__init__(base_layer, adapter_name, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(
            f"the weight of a {type(self.get_base_layer()).__name__} is of integers, which an adapter is not merged "
            f"into: keep the adapter, or merge it into the weights of floats by `twofour merge` and quantize those"
        )

    def unmerge(self) -> None:
        raise ValueError("nothing is merged")

    def get_delta_weight(self, adapter) -> torch.Tensor:
        """The update ``s · B A``, in float32."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        return (b.float() @ a.float()) * self.scaling[adapter]


def _registered(config: peft.LoraConfig) -> peft.LoraConfig:
    config._register_custom_module({IntegerLayer: LoraIntegerLinear})
    return config


def lora_config(**settings) -> peft.LoraConfig:
    """A ``peft.LoraConfig`` with which peft adapts layers of integers, too.

    Args:
        **settings: those of ``LoraConfig``.
    """
    return _registered(peft.LoraConfig(**settings))


def load_lora(model: torch.nn.Module, folder: str | os.PathLike, **settings) -> peft.PeftModel:
    """The model with an adapter that ``save_pretrained`` wrote.

    Args:
        model: the base model, in which layers may be of integers.
        folder: where the adapter is.
        **settings: those of ``PeftModel.from_pretrained``.
    """
    config = _registered(peft.LoraConfig.from_pretrained(os.fspath(folder)))
    return peft.PeftModel.from_pretrained(model, os.fspath(folder), config=config, **settings)
