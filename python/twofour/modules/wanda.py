"""Wanda: pruning by weight magnitude times input norm (Sun et al., "A Simple and Effective Pruning Approach for Large
Language Models", ICLR 2024), as a sparsifier of ``torch.ao.pruning``."""

from __future__ import annotations

import torch
from torch import nn
from torch.ao.pruning import BaseSparsifier

from ..operators.magnitude import keep_largest, two_largest
from .conversion import is_in_out
from .roles import reasons_to_stay_dense


class PerChannelNormObserver(nn.Module):
    """Measures the L2 norm of every input channel over all tokens that it has seen.

    Inputs are ``[..., channels]`` of any floating-point type; sums are in float32.

    Attributes:
        sum_of_squares: ``[channels]``, empty before the first input.
    """

    sum_of_squares: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("sum_of_squares", torch.empty(0, dtype=torch.float32), persistent=False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds an input, and returns it.

        Raises:
            ValueError: where it has another number of channels than those before.
        """
        squares = x.detach().reshape(-1, x.shape[-1]).float().square().sum(0)
        if self.sum_of_squares.numel() == 0:
            self.sum_of_squares = squares
        elif self.sum_of_squares.shape != squares.shape:
            raise ValueError(
                f"the input has {squares.numel()} channels, those before had {self.sum_of_squares.numel()}"
            )
        else:
            self.sum_of_squares = self.sum_of_squares.to(squares.device) + squares
        return x

    @property
    def norm(self) -> torch.Tensor:
        """The norms, ``[channels]`` of float32."""
        return self.sum_of_squares.sqrt()

    def reset(self) -> None:
        """Forgets all inputs."""
        self.sum_of_squares = self.sum_of_squares.new_empty(0)


def _observe(module: nn.Module, args: tuple) -> None:
    module.activation_post_process(args[0])


class WandaSparsifier(BaseSparsifier):
    """Prunes the weights whose magnitude times the norm of their input channel, ``|W| * norm(x)``, is smallest.

    ``prepare(model, config)``, forward passes with calibration data, ``step()``, ``squash_mask()``; the last also
    removes what ``prepare`` added to the layers. Elements are compared within an output row, as in the paper.

    Args:
        sparsity_level: the part of each row that is pruned, from 0 to 1; without ``semi_structured_block_size``.
        semi_structured_block_size: ``m`` prunes ``m // 2`` of each ``m`` consecutive elements of a row: 4 for 2:4.
        peer: the order of ``torchao.sparsity.WandaSparsifier``: scores with the squared norm, and without a block size
            compares within the whole layer.

    Raises:
        ValueError: for a level outside of 0 to 1, a block size below 2; in ``step()`` for a layer that has seen no
            input, and for a row that is not a multiple of the block size.
    """

    def __init__(
        self, sparsity_level: float = 0.5, semi_structured_block_size: int | None = None, *, peer: bool = False
    ):
        if not 0 <= sparsity_level <= 1:
            raise ValueError(f"sparsity_level must lie between 0 and 1, and is {sparsity_level}")
        if semi_structured_block_size is not None and semi_structured_block_size < 2:
            raise ValueError(f"semi_structured_block_size must be at least 2, and is {semi_structured_block_size}")
        super().__init__({"sparsity_level": sparsity_level, "semi_structured_block_size": semi_structured_block_size})
        self.peer = peer
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __getstate__(self):
        return {**super().__getstate__(), "peer": self.peer}

    def prepare(self, model: nn.Module, config: list[dict] | None) -> None:
        """Adds a mask and an observer of the inputs to the layers of a model, in place.

        Args:
            model: the model.
            config: one ``{"tensor_fqn": "name.weight"}`` a tensor, with ``sparsity_level`` and
                ``semi_structured_block_size`` where they differ; by default those that :func:`twofour.linear_layers`
                names, and transformers' ``Conv1D`` of repeated layers, whose rows here are its outputs.
        """
        if config is None:
            reasons = reasons_to_stay_dense(model, in_out=True)
            config = [{"tensor_fqn": f"{name}.weight"} for name, reason in reasons.items() if reason is None]
        super().prepare(model, config)
        for group in self.groups:
            module = group["module"]
            module.activation_post_process = PerChannelNormObserver()
            self._hooks.append(module.register_forward_pre_hook(_observe))

    @torch.no_grad()
    def update_mask(self, module, tensor_name, sparsity_level, semi_structured_block_size=None, **kwargs) -> None:
        """Computes the mask of one tensor from the unpruned weight, so that a later step may keep what an earlier one
        pruned."""
        mask = getattr(module.parametrizations, tensor_name)[0].mask
        weight = getattr(module.parametrizations, tensor_name).original
        observer = module.activation_post_process
        if observer.sum_of_squares.numel() == 0:
            raise ValueError(
                f"{kwargs.get('module_fqn', '')!r} has seen no input: run the model on calibration data between "
                f"prepare() and step()"
            )
        norm = observer.sum_of_squares if self.peer else observer.norm
        if weight.dim() != 2:
            raise ValueError(
                f"{kwargs.get('module_fqn', '')!r} is a {type(module).__name__} without a 2-D weight: leave it out"
            )
        in_out = is_in_out(module)
        score = (weight.t() if in_out else weight).abs().float() * norm.to(weight.device)
        kept = self._mask(score.contiguous(), sparsity_level, semi_structured_block_size, kwargs.get("module_fqn", ""))
        mask.copy_(kept.t() if in_out else kept)

    def _mask(self, score, level, block, name) -> torch.Tensor:
        rows, cols = score.shape
        if block is not None:
            if cols % block:
                raise ValueError(
                    f"{name!r}: rows of {cols} elements are no multiple of semi_structured_block_size={block}"
                )
            if block == 4:
                return two_largest(score)
            return keep_largest(score.view(rows, -1, block), block - block // 2).view(rows, cols)
        if self.peer:
            return keep_largest(score.view(1, -1), score.numel() - int(level * score.numel())).view(rows, cols)
        return keep_largest(score, cols - int(level * cols))

    def squash_mask(self, params_to_keep=None, params_to_keep_per_layer=None, *args, **kwargs) -> None:
        """Writes the pruned weights into the layers, and removes masks, observers and hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for group in self.groups:
            if hasattr(group["module"], "activation_post_process"):
                del group["module"].activation_post_process
        super().squash_mask(params_to_keep, params_to_keep_per_layer, *args, **kwargs)
