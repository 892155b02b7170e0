"""STEP's optimizer."""

from __future__ import annotations

import collections
import math

import torch


def _is_masked(p: torch.Tensor) -> bool:
    """Whether a parameter takes part in STEP; other attributes of that name are masks of bool."""
    return isinstance(getattr(p, "mask", None), str)


class AdamW_STEP(torch.optim.Optimizer):
    """AdamW that freezes the variances of sparse layers once they have settled, and then switches those layers to 2:4.

    STEP (Lu et al., "STEP: Learning N:M Structured Sparsity Masks from Scratch with Precondition", ICML 2023). Parameters take part by an
    attribute ``mask = "dense"``, which :class:`twofour.pretrain.STEPLinear` sets. All are trained by AdamW at first. After each step the
    mean change of the masked parameters' variances, ``Z``, is computed; where its mean over the last ``1 / (1 - beta2)`` steps is below
    ``eps``, the optimizer switches: ``mask`` becomes ``"sparse"``, and from then on ``p -= lr * m_hat / (sqrt(v*) + eps**0.75)`` with the
    variance ``v*`` of the switch. Other parameters stay with AdamW. ``step()`` reads one number from the device before the switch, and none
    after it.

    Two differences from the toolkit: ``v*`` is corrected for its start at zero, without which an early switch multiplies the learning rate;
    the window is rounded and not cut, so that 0.95 gives 20 steps, not 19. As there, the window need not be full.

    Args:
        params: parameters or groups.
        lr: the learning rate.
        betas: the decay rates of mean and variance.
        eps: what is added to the root of the variance, and the threshold of ``Z``.
        weight_decay: decoupled.
        amsgrad: uses the largest variance so far.
        clipping: ``(T_min, T_max)``, in steps: the switch happens after ``T_min`` and at the latest after ``T_max``; recommended are 10 %
            and 50 % of all.
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
        if (clipping[0] is None) != (clipping[1] is None) or (clipping[0] is not None and not 0 <= clipping[0] <= clipping[1]):
            raise ValueError(f"clipping must be (None, None) or (T_min, T_max) with 0 <= T_min <= T_max, and is {clipping}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad})
        self.clipping = tuple(clipping)
        self.option = option
        self.steps = 0
        self.switched_at: int | None = None
        self._changes: collections.deque[float] = collections.deque(maxlen=self._window())

    def _window(self) -> int:
        return max(1, round(1 / (1 - self.param_groups[0]["betas"][1])))

    @property
    def switched(self) -> bool:
        """Whether variances are frozen and layers sparse."""
        return self.switched_at is not None

    def state_dict(self) -> dict:
        """torch's state, and under ``"step"`` the number of steps, that of the switch, and the last values of ``Z``."""
        own = {"steps": self.steps, "switched_at": self.switched_at, "changes": list(self._changes)}
        return {**super().state_dict(), "step": own}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads what :meth:`state_dict` returned, and switches layers where it had switched."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "step"})
        own = state_dict["step"]
        self.steps, self.switched_at = own["steps"], own["switched_at"]
        self._changes = collections.deque(own["changes"], maxlen=self._window())
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
        self.steps += 1
        total, count = [], 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                change = self._update(p, group)
                if change is not None:
                    total.append(change)
                    count += p.numel()
        if total and not self.switched:
            self._watch(torch.stack([t.to(total[0].device) for t in total]).sum().item() / count)
        return loss

    def _update(self, p: torch.Tensor, group: dict) -> torch.Tensor | None:
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
        (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
        p.mul_(1 - lr * group["weight_decay"])
        mean, variance = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(p.grad, 1 - beta1)
        change = None
        if self.switched and _is_masked(p) and "switched_at" in state:
            correction, floor = 1 - beta2 ** state["switched_at"], eps**0.75
        else:
            before = variance.clone() if _is_masked(p) and not self.switched else None
            variance.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            correction, floor = 1 - beta2 ** state["step"], eps
            if before is not None:
                change = self._size(variance - before)
        if group["amsgrad"]:
            variance = torch.maximum(state["max_exp_avg_sq"], variance, out=state["max_exp_avg_sq"])
        denominator = variance.sqrt().div_(math.sqrt(correction)).add_(floor)
        p.addcdiv_(mean, denominator, value=-lr / (1 - beta1 ** state["step"]))
        return change

    def _size(self, change: torch.Tensor) -> torch.Tensor:
        change = change.abs().float()
        if self.option == 1:
            return change.sum()
        return change.clamp_(min=torch.finfo(torch.float32).tiny).log_().sum()

    def _watch(self, mean: float) -> None:
        """Takes note of a step's ``Z``, and switches when it is time."""
        self._changes.append(mean if self.option == 1 else math.exp(mean))
        settled = sum(self._changes) / len(self._changes) < self.param_groups[0]["eps"]
        earliest, latest = (0, math.inf) if self.clipping[1] is None else self.clipping
        if self.steps > latest or (settled and self.steps > earliest):
            self.switched_at = self.steps
            for p in self._masked():
                p.mask = "sparse"
                if self.state[p]:
                    self.state[p]["switched_at"] = self.state[p]["step"]
