#!/usr/bin/env python3
"""The programs of the 2by4-pretrain toolkit, with the import changed: layers of the user's own for FST, S-STE and STEP,
made from its functions.

    python python/examples/pretrain.py

`import sparse` became `import twofour.pretrain as sparse`, and `to_sparse_semi_structured` comes from `twofour.sparse`.
`twofour.pretrain` has these layers ready: SparseLinearTranspose, SparseLinear and STEPLinear (see gpt_pretrain.py).
"""

import torch
import torch.nn.functional as F
from torch import autograd, nn

import twofour.pretrain as sparse  # was: import sparse
from twofour.sparse import to_sparse_semi_structured

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if DEVICE == "cuda" else torch.bfloat16


class SparseMatmul(autograd.Function):
    """``x @ W.T`` where W and its transpose are 2:4, and the output gradient is replaced by its 2:4 estimate."""

    @staticmethod
    def forward(ctx, x, weight, weight_sparse, weight_sparse_T):
        ctx.weight_T = weight_sparse_T
        ctx.save_for_backward(x)
        return torch.mm(x, weight_sparse.t())

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        grad_input = torch.mm(grad_output, ctx.weight_T.t())
        grad_weight = torch.mm(to_sparse_semi_structured(grad_output.t(), MVUE24=True), x)
        return grad_input, grad_weight.float(), None, None


class FstLinear(nn.Linear):
    """FST: a mask that is 2:4 both ways, chosen anew every 10 steps."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.weight.counter, self.weight.mode = 0, "sparse"
        self.transposable_sparse = sparse.TransposableSparse(abs=True)

    def forward(self, x):
        weight = self.weight
        if weight.mode == "dense":
            return F.linear(x, weight, self.bias)
        if weight.counter % 10 == 0:
            _, weight.mask = self.transposable_sparse(weight.to(HALF))
        weight.counter += 1
        weight_sparse = to_sparse_semi_structured(weight, mask=weight.mask, dtype=HALF)
        weight_sparse_T = to_sparse_semi_structured(weight.T, mask=weight.mask.T, dtype=HALF)
        return SparseMatmul.apply(x.to(HALF), weight, weight_sparse, weight_sparse_T).float() + self.bias


class SoftThreshold(autograd.Function):
    """``scale * S(W)``; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, weight, scale):
        weight_sparse, _ = sparse.soft_threshold24_triton(weight.detach().to(HALF))
        return weight_sparse.float() * scale

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


class SsteLinear(nn.Linear):
    """S-STE: the soft threshold, with a scale that is computed once."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.register_buffer("scale", torch.tensor(0.0))

    @torch.no_grad()
    def init_scale(self):
        soft, _ = sparse.soft_threshold24_triton(self.weight.detach().to(HALF))
        soft = soft.float()
        self.scale.copy_(torch.dot(self.weight.flatten(), soft.flatten()) / torch.dot(soft.flatten(), soft.flatten()))

    def forward(self, x):
        if self.scale == 0:
            self.init_scale()
        return F.linear(x, SoftThreshold.apply(self.weight, self.scale), self.bias)


class StepLinear(nn.Linear):
    """STEP: dense until the optimizer switches, then the two largest of four."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.weight.mask = "dense"

    def forward(self, x):
        if self.training and self.weight.mask == "dense":
            return F.linear(x, self.weight, self.bias)
        weight, _ = sparse.sparse24_triton(self.weight.to(HALF))
        return F.linear(x, weight.float(), self.bias)


def masked_decay(model: nn.Module, alpha: float) -> None:
    """FST's second step: weights that the mask drops shrink."""
    with torch.no_grad():
        for p in model.parameters():
            if isinstance(getattr(p, "mask", None), torch.Tensor) and p.mode == "sparse":
                sparse.masked_add_(p.grad.data, p.data, p.mask, alpha=alpha)


def train(linear, steps: int = 40) -> None:
    """Trains a gated layer pair to turn its input around."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(64, 512), sparse.GELUglu(), linear(256, 64)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if linear is StepLinear:
        optimizer = sparse.AdamW_STEP(
            model.parameters(), lr=3e-3, betas=(0.9, 0.95), clipping=(steps // 10, steps // 2)
        )
    losses = []
    for step in range(steps):
        if linear is FstLinear and step == steps - steps // 6:
            # FST's third step: dense at the end.
            model[0].weight.mode = model[2].weight.mode = "dense"
        x = torch.randn(64, 64, device=DEVICE)
        loss = F.mse_loss(model(x), x.flip(-1))
        optimizer.zero_grad()
        loss.backward()
        masked_decay(model, 2e-4)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    print(f"{linear.__name__}: loss {losses[0]:.3f}, after {steps} steps {losses[-1]:.3f}")


if __name__ == "__main__":
    for layer in (FstLinear, SsteLinear, StepLinear):
        train(layer)
