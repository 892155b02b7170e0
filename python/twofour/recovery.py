"""Recovery of a pruned model from the dense one that it was.

==========================  ==========================================================================================
:func:`distillation_loss`   what a student's logits lack of a teacher's, without all logits in memory at once
:func:`keep_zeros`          optimizers leave the zeros of 2:4 weights as they are
:func:`tune_block`          trains a pruned block on what the dense block computes
==========================  ==========================================================================================

``twofour train recipes/recover.toml`` and ``twofour prune --tune`` do the same without Python.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

__all__ = ["distillation_loss", "keep_zeros", "tune_block"]


def distillation_loss(
    hidden, head, teacher_hidden, teacher_head, targets=None, *, divergence=1.0, cross_entropy=0.0, chunk=1024
):
    """The mean over tokens of ``divergence * KL(teacher || student) + cross_entropy * -log student[target]``, in nats.

    ``hidden`` and ``teacher_hidden`` are what the heads read, ``[..., width]`` each of its own width; ``head`` and
    ``teacher_head`` are modules or functions that turn them into logits of one vocabulary. Logits are made ``chunk``
    tokens at a time, and made again in the backward pass. The teacher gets no gradients. ``targets`` are token numbers,
    one for each token; those below 0 have no cross-entropy, as -100 in transformers.
    """
    if divergence < 0 or cross_entropy < 0 or not divergence + cross_entropy > 0:
        raise ValueError(f"weights {divergence} and {cross_entropy} are not from 0 up, one of them above 0")
    if (targets is None) != (cross_entropy == 0):
        raise ValueError("cross-entropy has a weight above 0 where there are targets, and nowhere else")
    if chunk < 1:
        raise ValueError(f"a chunk of {chunk} tokens is not at least 1")
    hidden, teacher_hidden = hidden.reshape(-1, hidden.shape[-1]), teacher_hidden.reshape(-1, teacher_hidden.shape[-1])
    tokens = len(hidden)
    if len(teacher_hidden) != tokens or targets is not None and targets.numel() != tokens:
        found = "no targets" if targets is None else f"{targets.numel()} targets"
        raise ValueError(f"{tokens} tokens of the student, {len(teacher_hidden)} of the teacher, {found}")
    if tokens == 0:
        raise ValueError("there are no tokens")
    targets = None if targets is None else targets.reshape(-1)

    def of(hidden, taught, targets):
        with torch.no_grad():
            taught = F.log_softmax(teacher_head(taught).float(), dim=-1)
        own = F.log_softmax(head(hidden).float(), dim=-1)
        if own.shape != taught.shape:
            raise ValueError(f"the student has {own.shape[-1]} logits, and the teacher {taught.shape[-1]}")
        loss = divergence * F.kl_div(own, taught, reduction="sum", log_target=True) if divergence else own.sum() * 0
        if targets is not None:
            loss = loss + cross_entropy * F.nll_loss(own, targets.clamp(min=-1), ignore_index=-1, reduction="sum")
        return loss

    parts = [(hidden[i : i + chunk], teacher_hidden[i : i + chunk], None if targets is None else targets[i : i + chunk])
             for i in range(0, tokens, chunk)]
    return sum(checkpoint(of, *part, use_reentrant=False) for part in parts) / tokens


def _mask(weight):
    """What a weight keeps, where it is 2:4 along its rows; otherwise None."""
    if weight.dim() < 2 or weight.shape[-1] % 4 or not weight.is_floating_point():
        return None
    kept = weight.detach() != 0
    return kept if bool((kept.reshape(-1, 4).sum(-1) <= 2).all()) else None


def _masks(module):
    return {name: mask for name, own in module.named_parameters() if (mask := _mask(own)) is not None}


@contextlib.contextmanager
def keep_zeros(module):
    """Within it, the parameters of ``module`` that are 2:4 along their rows get no gradients where they are zero, so
    that optimizers leave the zeros as they are. Returns the names of these parameters."""
    masks, own = _masks(module), dict(module.named_parameters())
    handles = [own[name].register_hook(mask.to(own[name].dtype).mul) for name, mask in masks.items()]
    try:
        yield list(masks)
    finally:
        for handle in handles:
            handle.remove()


def _first(output):
    return output[0] if isinstance(output, (tuple, list)) else output


def _error(output, target):
    """The mean over tokens of ``|output - target|^2 / |target|^2``."""
    output, target = output.float().flatten(0, -2), target.float().flatten(0, -2)
    size = target.square().sum(-1)
    return ((output - target).square().sum(-1) / size.where(size > 0, torch.inf)).mean()


def tune_block(block, dense, inputs, dense_inputs=None, *, passes=8, learning_rate=1e-4, call=None):
    """Trains the parameters of ``block``, a pruned module, by Adam until it computes what ``dense`` does; zeros of 2:4
    weights stay. Returns the error of the first input before and after: the mean over tokens of the squared distance
    from the dense output, over that output's square. Where it did not fall, the parameters stay as they were.

    ``inputs`` is a sequence of what the block reads in the pruned model, ``dense_inputs`` what the dense block reads in
    the dense model (by default the same); each is one step. ``call(module, input)`` runs a module, by default as
    ``module(input)``; of a tuple that it returns the first is taken. Parameters are trained in f32, whatever their
    type, and the learning rate falls linearly to 0.
    """
    dense_inputs = inputs if dense_inputs is None else dense_inputs
    if len(inputs) == 0 or len(inputs) != len(dense_inputs):
        raise ValueError(f"{len(inputs)} inputs of the block and {len(dense_inputs)} of the dense one")
    if passes < 1 or not 0 < learning_rate < float("inf"):
        raise ValueError(f"{passes} passes at a rate of {learning_rate} are not at least one, at a finite rate above 0")
    call = call or (lambda module, x: module(x))
    own = {name: parameter for name, parameter in block.named_parameters() if parameter.requires_grad}
    if not own:
        raise ValueError("no parameter of the block requires gradients")
    masks = _masks(block)
    masters = {name: p.detach().to(torch.float32, copy=True).requires_grad_() for name, p in own.items()}

    class Run(torch.nn.Module):
        """`call` as the forward of a module, whose parameters can be replaced."""

        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return _first(call(self.block, x))

    run = Run()

    def output(x):
        of = lambda name, master: (master * masks[name] if name in masks else master).to(own[name].dtype)
        return functional_call(run, {f"block.{name}": of(name, master) for name, master in masters.items()}, (x,))

    with torch.no_grad():
        targets = [_first(call(dense, x)) for x in dense_inputs]
        before = float(_error(output(inputs[0]), targets[0]))
    # Relative errors have small gradients.
    optimizer = torch.optim.Adam(masters.values(), lr=learning_rate, eps=1e-12)
    steps = passes * len(inputs)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - step / steps)
        optimizer.zero_grad()
        with torch.enable_grad():
            _error(output(inputs[step % len(inputs)]), targets[step % len(inputs)]).backward()
        optimizer.step()
    with torch.no_grad():
        after = float(_error(output(inputs[0]), targets[0]))
        if after < before:
            for name, parameter in own.items():
                parameter.copy_(masters[name] * masks[name] if name in masks else masters[name])
    return before, after
