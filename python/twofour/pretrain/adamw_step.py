"""STEP's optimizer."""

from __future__ import annotations

import math
import warnings

import torch

from .. import _native, operators
from ..modules.conversion import is_sharded


def _is_masked(p: torch.Tensor) -> bool:
    """Whether a parameter takes part in STEP; other attributes of that name are masks of bool."""
    return isinstance(getattr(p, "mask", None), str)


#: Types that the native operator updates faster than torch's operators; float16, which it takes too, is slower there.
_NATIVE = (torch.float32, torch.bfloat16)


def _is_native(p: torch.Tensor, state: dict) -> bool:
    """Whether the native operator updates a parameter and its moments."""
    tensors = (p, *(moment for moment in state.values() if isinstance(moment, torch.Tensor)))
    return (
        p.dtype in _NATIVE
        and p.grad.dtype is p.dtype
        and all(
            t.is_cpu and t.dtype is p.dtype and t.is_contiguous() and type(t) in (torch.Tensor, torch.nn.Parameter)
            for t in tensors
        )
    )


def _summed(changes: list[torch.Tensor | float]) -> float:
    """The sum of numbers and of scalars on devices, of which one is read from each device."""
    on_device = [change for change in changes if isinstance(change, torch.Tensor)]
    numbers = sum(change for change in changes if not isinstance(change, torch.Tensor))
    if not on_device:
        return numbers
    return numbers + torch.stack([change.to(on_device[0].device) for change in on_device]).sum().item()


class AdamW_STEP(torch.optim.Optimizer):
    """AdamW that freezes the variances of sparse layers once they have settled, and then switches those layers to 2:4.

    STEP (Lu et al., "STEP: Learning N:M Structured Sparsity Masks from Scratch with Precondition", ICML 2023).
    Parameters take part by an attribute ``mask = "dense"``, which :class:`twofour.pretrain.STEPLinear` sets. All are
    trained by AdamW at first. After each step the mean change of the masked parameters' variances, ``Z``, is computed;
    where its mean over the last ``1 / (1 - beta2)`` steps is below ``eps``, the optimizer switches: ``mask`` becomes
    ``"sparse"``, and from then on ``p -= lr * m_hat / (sqrt(v*) + eps**0.75)`` with the variance ``v*`` of the switch.
    Other parameters stay with AdamW. ``step()`` reads one number from the device before the switch, and none after it.

    Two differences from the toolkit: ``v*`` is corrected for its start at zero, without which an early switch
    multiplies the learning rate; the window is rounded and not cut, so that 0.95 gives 20 steps, not 19. As there, the
    window need not be full.

    On a CPU a parameter, its moments and the change of its variance are computed in one pass (``twofour::adamw_step``),
    where the parameter is contiguous and of float32 or bfloat16. Other parameters and those on a GPU are updated by
    torch's operators.

    Args:
        params: parameters or groups.
        lr: the learning rate.
        betas: the decay rates of mean and variance.
        eps: what is added to the root of the variance, and the threshold of ``Z``.
        weight_decay: decoupled.
        amsgrad: uses the largest variance so far.
        clipping: ``(T_min, T_max)``, in steps: the switch happens after ``T_min`` and at the latest after ``T_max``;
            recommended are 10 % and 50 % of all.
        option: 1: ``Z`` is the arithmetic mean of the changes' magnitudes; 2: the geometric one.

    Raises:
        ValueError: for a hyperparameter out of range.
        RuntimeError: in ``step()`` for a sparse gradient.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        clipping: tuple[int | None, int | None] = (None, None),
        option: int = 1,
    ):
        if not lr >= 0:
            raise ValueError(f"lr must not be negative, and is {lr}")
        if not eps >= 0:
            raise ValueError(f"eps must not be negative, and is {eps}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), and are {betas}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, and is {weight_decay}")
        if option not in (1, 2):
            raise ValueError(f"option must be 1 or 2, and is {option}")
        if (clipping[0] is None) != (clipping[1] is None) or (
            clipping[0] is not None and not 0 <= clipping[0] <= clipping[1]
        ):
            raise ValueError(
                f"clipping must be (None, None) or (T_min, T_max) with 0 <= T_min <= T_max, and is {clipping}"
            )
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        )
        self.clipping = tuple(clipping)
        self.option = option
        self._switch = self._switch_after(0, None, [])

    def _switch_after(self, steps: int, switched_at: int | None, changes: list[float]) -> _native.StepSwitch:
        window = max(1, round(1 / (1 - self.param_groups[0]["betas"][1])))
        bounds = None if self.clipping[1] is None else self.clipping
        return _native.StepSwitch(window, self.option, bounds, steps, switched_at, changes)

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._switch.steps()

    @property
    def switched_at(self) -> int | None:
        """The step after which it switched, or ``None``."""
        return self._switch.switched_at()

    @property
    def switched(self) -> bool:
        """Whether variances are frozen and layers sparse."""
        return self.switched_at is not None

    def state_dict(self) -> dict:
        """torch's state, and under ``"step"`` the number of steps, that of the switch, and the last values of ``Z``."""
        own = {"steps": self.steps, "switched_at": self.switched_at, "changes": self._switch.changes()}
        return {**super().state_dict(), "step": own}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads what :meth:`state_dict` returned, and switches layers where it had switched."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "step"})
        own = state_dict["step"]
        self._switch = self._switch_after(own["steps"], own["switched_at"], own["changes"])
        for p in self._masked():
            p.mask = "sparse" if self.switched else "dense"

    def _masked(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if _is_masked(p)]

    @torch.no_grad()
    def step(self, closure=None):
        """One step; the closure computes the loss anew.

        Returns:
            the closure's loss, or ``None``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._switch.advance()
        total, count = [], 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                change = self._update(p, group)
                if change is not None:
                    total.append(change)
                    count += p.numel()
        if self.steps == 1 and not self._masked():
            warnings.warn(
                "no parameter takes part in STEP, so that AdamW_STEP trains by AdamW and no layer becomes sparse: take "
                "the parameters of STEPLinear "
                "layers, under fully_shard rather than FullyShardedDataParallel, which replaces them",
                stacklevel=2,
            )
        if total and not self.switched and self._switch.observe(_summed(total), count, self.param_groups[0]["eps"]):
            for p in self._masked():
                p.mask = "sparse"
                if self.state[p]:
                    self.state[p]["switched_at"] = self.state[p]["step"]
        return loss

    def _update(self, p: torch.Tensor, group: dict) -> torch.Tensor | float | None:
        """Updates one parameter; returns the sum of its variance's changes where it takes part and has not switched."""
        if p.grad.is_sparse:
            raise RuntimeError("AdamW_STEP does not take sparse gradients")
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        frozen_at = state.get("switched_at") if self.switched and _is_masked(p) else None
        watched = _is_masked(p) and not self.switched
        if _is_native(p, state):
            return self._update_native(p, state, group, frozen_at, watched)
        (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
        p.mul_(1 - lr * group["weight_decay"])
        mean, variance = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(p.grad, 1 - beta1)
        change = None
        if frozen_at is not None:
            correction, floor = 1 - beta2**frozen_at, eps**0.75
        else:
            before = variance.clone() if watched else None
            variance.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            correction, floor = 1 - beta2 ** state["step"], eps
            if before is not None:
                change = self._size(variance - before)
        if group["amsgrad"]:
            variance = torch.maximum(state["max_exp_avg_sq"], variance, out=state["max_exp_avg_sq"])
        denominator = variance.sqrt().div_(math.sqrt(correction)).add_(floor)
        p.addcdiv_(mean, denominator, value=-lr / (1 - beta1 ** state["step"]))
        return change

    def _update_native(
        self, p: torch.Tensor, state: dict, group: dict, frozen_at: int | None, watched: bool
    ) -> float | None:
        largest = state["max_exp_avg_sq"] if group["amsgrad"] else p.new_empty(0)
        beta1, beta2 = group["betas"]
        numbers = (float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
        moments = (state["exp_avg"], state["exp_avg_sq"], largest)
        option = self.option if watched else 0
        change = operators.adamw_step_(p, p.grad, *moments, *numbers, state["step"], frozen_at or 0, option)
        return change if watched else None

    def _size(self, change: torch.Tensor) -> torch.Tensor:
        change = change.abs().float()
        if self.option != 1:
            change = change.clamp_(min=torch.finfo(torch.float32).tiny).log_()
        total = change.sum()
        # Of a parameter that is sharded, over all ranks.
        return total.full_tensor() if is_sharded(total) else total
