"""Low-rank factorization of a model's linear layers, with ranks by a budget.

``D`` is a weight, or what pruning took away from it. The factors of rank ``k`` that change the layer's outputs least
on inputs ``X`` are ``S = U`` and ``Q = Uᵀ·D``, with the ``k`` largest eigenvectors ``U`` of ``D·X·Xᵀ·Dᵀ``. Each
eigenvalue is the error that its direction takes away. :meth:`twofour.LayerInputs.low_rank` finds the largest few; here
a layer's whole spectrum is needed, for the choice of ranks.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..arrays.layer import LayerInputs
from ..canonical import parts_shapes
from .conversion import (
    SparseLayer,
    chosen,
    expect_convertible,
    expect_no_adapters,
    is_in_out,
    is_sparse,
    replace,
    take_over,
)
from .linear import DTYPES, Linear
from .low_rank import LowRankLinear
from .packed_layer import PackedLayer
from .rank_budget import Options, spend
from .roles import by_default

#: Directions with less than this part of the largest one's error are rounding.
_ROUNDING = 1e-10


@dataclasses.dataclass(frozen=True)
class FactoredLayer:
    """What became of a layer.

    Attributes:
        name: its name in the model.
        shape: of the weight, ``(out_features, in_features)``.
        rank: of the factors: 0 for a 2:4 weight alone, ``None`` where the layer stays dense.
        tokens: rows of the calibration that reached it.
        parameters_before: elements of its weight.
        parameters_after: elements of its factors and kept ones of its 2:4 part.
        error: the squared change of its outputs on the calibration over their square.
    """

    name: str
    shape: tuple[int, int]
    rank: int | None
    tokens: int
    parameters_before: int
    parameters_after: int
    error: float


@dataclasses.dataclass(frozen=True)
class LowRankReport:
    """What became of a model. ``str()`` of it is a table that is meant to be read.

    Attributes:
        layers: the chosen layers, in the model's order.
        parameters_before: parameters of the whole model, shared ones once, of 2:4 weights the kept ones.
        parameters_after: the same afterwards.
        bytes_before: what they take in a state dict, positions of 2:4 weights included.
        bytes_after: the same afterwards.
    """

    layers: tuple[FactoredLayer, ...]
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        rows = [("layer", "weight", "rank", "parameters", "of", "error", "")] + [
            (
                layer.name,
                f"{layer.shape[0]}x{layer.shape[1]}",
                "dense" if layer.rank is None else str(layer.rank),
                str(layer.parameters_after),
                str(layer.parameters_before),
                f"{layer.error:.4f}",
                "" if layer.tokens else "no token reached it",
            )
            for layer in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if place in (0, 6) else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines.append(
            f"whole model: {self.parameters_after} of {self.parameters_before} parameters, {self.bytes_after} of "
            f"{self.bytes_before} bytes"
        )
        return "\n".join(lines)


@torch.no_grad()
def low_rank_(
    model: nn.Module,
    calibration: Iterable[Any],
    *,
    rank: int | str | None = None,
    parameters: int | str | None = None,
    memory: int | str | None = None,
    sparsity: str | None = None,
    method: str = "alps",
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
) -> LowRankReport:
    """Replaces linear layers ``Wx``, in place, by ``S(Qx)`` of a lower rank; with ``sparsity="2:4"`` by ``Px + S(Qx)``,
    where ``P`` is the pruned weight and ``S·Q`` stands for what pruning took away.

    Factors change a layer's outputs on the calibration least. A budget goes to the directions that take away most of
    the layers' relative errors for each parameter or byte; it is for the whole model, what is not replaced included. A
    layer for which factors are no smaller stays dense. Without ``sparsity``, a budget may leave a layer dense where
    that takes away more error for its size than factors elsewhere. The new layers are
    :class:`twofour.LowRankLinear`, or :class:`twofour.Linear` where no rank is left beside a 2:4 part. Factors train on; :func:`twofour.load_low_rank_` loads state dicts, and
    :func:`twofour.to_dense` multiplies the factors.

    The calibration runs once through the dense model, in evaluation, and takes ``4 * in_features ** 2`` bytes for each
    layer, twice that with ``sparsity``. A row that enters a layer counts as a token: leave padding out.

    Args:
        model: the model, of float32, bfloat16, float16 or, without ``sparsity``, float64.
        calibration: batches: tensors for ``model(batch)``, tuples and lists for ``model(*batch)``, mappings for
            ``model(**batch)``. Layers have to see several times more tokens than they have inputs.
        rank: of every layer: a number, or the share of the weight's elements that the factors have, ``"25%"``.
        parameters: the most of the whole model: a number, or a share of what it has, ``"60%"``.
        memory: the most bytes that they take, likewise. One of the three is given.
        sparsity: ``"2:4"`` for a 2:4 part.
        method: how that is pruned, as in :meth:`twofour.LayerInputs.prune`.
        filter_fn: ``filter_fn(module, name)`` says whether a layer is factored; by default those that
            :func:`twofour.linear_layers` names, and transformers' ``Conv1D`` of repeated layers. Of these, one that no
            token reached stays dense.
        call: runs ``call(model, batch)`` instead.

    Returns:
        rank, parameters and error of each layer, and the size of the whole model.

    Raises:
        ValueError: for a budget below what is possible, with that; for a layer that cannot be replaced, whose weight is
            sparse or shared, that a filter takes and no token reached, that saw NaNs or zeros alone, each with its
            name. The model is then as it was.
        TypeError: for a subclass of ``nn.Linear`` whose own methods would be lost, and for another dtype, with the
            layer's name.
    """
    if sum(choice is not None for choice in (rank, parameters, memory)) != 1:
        raise ValueError("one of rank, parameters and memory is required")
    if sparsity not in (None, "2:4"):
        raise ValueError(f"sparsity is None or '2:4', not {sparsity!r}")
    before = _sizes(model)
    if rank is not None:
        _amount(rank, "rank", 1)
    # In bytes where the budget is.
    unit = 0 if memory is None else 1
    if rank is None:
        allowed = _amount(*((parameters, "parameters") if memory is None else (memory, "memory")), before[unit])
    plans = [_Plan(name, layer, sparsity) for name, layer in _layers(model, filter_fn, sparsity)]
    _calibrate(model, plans, calibration, call or _run)
    reached = [plan for plan in plans if plan.tokens]
    unreached = next((plan.name for plan in plans if not plan.tokens), None)
    if unreached is not None and (filter_fn or not reached):
        raise ValueError(f"{unreached!r}: no token of the calibration reached it: leave it out with filter_fn, or "
                         f"calibrate with other batches")  # fmt: skip
    few = [plan for plan in reached if plan.tokens < plan.shape[1]]
    if few:
        warnings.warn(
            f"{len(few)} layers saw fewer tokens than they have inputs, such as {few[0].name!r}, {few[0].tokens} for "
            f"{few[0].shape[1]}: their factors fit these tokens alone; calibrate with more",
            stacklevel=2,
        )
    for plan in reached:
        plan.solve(method)
    if rank is not None:
        ranks = [plan.within(rank) for plan in reached]
    else:
        options = [plan.options(unit) for plan in reached]
        elsewhere = before[unit] - sum(plan.dense_cost(unit) for plan in reached)
        least = elsewhere + sum(option.costs[0] for option in options)
        if allowed < least:
            raise ValueError(
                f"{allowed} {'bytes' if unit else 'parameters'} are too few: with the smallest ranks in the "
                f"{len(reached)} chosen layers the model has {least}, {elsewhere} of them elsewhere"
            )
        taken = spend(allowed - elsewhere, options)
        ranks = [plan.ranks[option] for plan, option in zip(reached, taken, strict=True)]
    pairs, found = [], {}
    for plan, chosen_rank in zip(reached, ranks, strict=True):
        new, found[plan.name] = plan.replacement(chosen_rank)
        pairs += [] if new is None else [(plan.layer, new)]
    replace(model, pairs)
    after = _sizes(model)
    layers = tuple(found.get(plan.name) or plan.report(None, 0.0) for plan in plans)
    return LowRankReport(layers, before[0], after[0], before[1], after[1])


def _layers(model, filter_fn, sparsity) -> list[tuple[str, nn.Module]]:
    layers = chosen(model, filter_fn or by_default(model, in_out=True))
    factors = {id(factor) for module in model.modules() if isinstance(module, LowRankLinear)
               for factor in module.children()}  # fmt: skip
    if filter_fn is None:
        layers = [(name, layer) for name, layer in layers if id(layer) not in factors]
    if not layers:
        raise ValueError(f"no linear layer of {type(model).__name__} is chosen")
    expect_no_adapters(model, layers)
    adapted = {id(module._modules.get("base_layer")) for module in model.modules()}
    owners: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for parameter in filter(lambda each: each is not None, module._parameters.values()):
            owners.setdefault(id(parameter), []).append(prefix)
    for name, layer in layers:
        try:
            _expect_factorable(layer, sparsity)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name!r}: {error}") from error
        if layer is model:
            raise ValueError(
                f"the model itself is a {type(model).__name__}, which cannot be replaced in place: wrap it in "
                f"nn.Sequential"
            )
        if id(layer) in adapted:
            raise ValueError(f"{name!r} is the base layer of an adapter, which writes to its weight: merge that first")
        if id(layer) in factors:
            raise ValueError(f"{name!r} is a part of a LowRankLinear already: leave it out")
        others = [other for other in owners[id(layer.weight)] if other != name]
        if len(owners[id(layer.weight)]) > 1:
            raise ValueError(f"{name!r}: its weight is that of {others[0]!r}, too: leave it out")
    return layers


def _expect_factorable(layer: nn.Module, sparsity: str | None) -> None:
    if not is_in_out(layer):
        expect_convertible(layer)
    weight = layer._parameters.get("weight")
    if isinstance(layer, SparseLayer) or (weight is not None and is_sparse(weight)):
        raise ValueError("its weight is sparse already: make the model dense first with twofour.to_dense")
    if weight is None or weight.dim() != 2:
        raise ValueError("its weight is no parameter, since a parametrization or a hook computes it: undo that first")
    if weight.is_meta:
        raise ValueError("its weight is on the device meta: load it first")
    if 0 in weight.shape:
        raise ValueError("its weight has no elements: leave it out")
    dtypes = DTYPES if sparsity else (*DTYPES, torch.float64)
    if weight.dtype not in dtypes:
        raise TypeError(f"its weight is {weight.dtype}; one of {', '.join(map(str, dtypes))} is required")
    if not weight.isfinite().all():
        raise ValueError("its weight has a NaN or an infinity")


def _amount(given: int | str, what: str, whole: int) -> int:
    """A number, or a share of a whole.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(given, str) and given.endswith("%"):
        try:
            share = float(given[:-1])
        except ValueError:
            share = 0.0
        if 0 < share <= 100:
            return int(share / 100 * whole)
    elif isinstance(given, numbers.Integral) and not isinstance(given, bool) and given > 0:
        return int(given)
    raise ValueError(f"{what} is a number from 1 or a share such as '60%', not {given!r}")


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Parameters of a model and their bytes, shared ones once."""
    parameters = size = 0
    for parameter in model.parameters():
        blocks = getattr(parameter, "bsr_values", parameter)
        if hasattr(parameter, "packed_weight"):
            kept, own = _sparse_size(*parameter.shape, parameter.dtype)
        else:
            kept, own = blocks.numel(), blocks.numel() * blocks.element_size()
        parameters, size = parameters + kept, size + own
    for layer in model.modules():
        if isinstance(layer, PackedLayer):
            parameters += math.prod(parts_shapes(layer.out_features, layer.in_features)[0])
            size += sum(part.nbytes for part in layer.canonical())
    return parameters, size


def _sparse_size(rows: int, cols: int, dtype: torch.dtype) -> tuple[int, int]:
    """Kept elements of a 2:4 weight, and the bytes of its values and positions."""
    kept, words = map(math.prod, parts_shapes(rows, cols))
    return kept, kept * dtype.itemsize + 4 * words


def _run(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _calibrate(model, plans, calibration, call) -> None:
    """Runs batches, in evaluation, and gives each layer's inputs to its plan."""
    handles = [plan.layer.register_forward_pre_hook(plan.observe, with_kwargs=True) for plan in plans]
    modes = [(module, module.training) for module in model.modules()]
    batches = 0
    try:
        model.eval()
        for batch in calibration:
            call(model, batch)
            batches += 1
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    if not batches:
        raise ValueError("the calibration has no batches")


class _Plan:
    """A layer that is to be replaced: what enters it, and what each rank would cost and leave of its error."""

    def __init__(self, name: str, layer: nn.Module, sparsity: str | None):
        self.name, self.layer = name, layer
        weight = layer.weight.detach()
        self.weight = weight.t() if is_in_out(layer) else weight
        self.shape = tuple(self.weight.shape)
        self.tokens = 0
        self.products = torch.zeros(self.shape[1], self.shape[1], device=weight.device)
        self.inputs = LayerInputs(self.shape[1]) if sparsity else None
        self.pruned: torch.Tensor | None = None

    def observe(self, _, args: tuple, kwargs: dict) -> None:
        """A forward pre-hook."""
        x = (args[0] if args else next(iter(kwargs.values()))).detach()
        x = x.reshape(-1, x.shape[-1]).float()
        if not len(x):
            return
        self.tokens += len(x)
        with torch.autocast(x.device.type, enabled=False):
            self.products.addmm_(x.t(), x)
        if self.inputs is not None:
            try:
                self.inputs.add(x)
            except ValueError as error:
                raise ValueError(f"{self.name!r}: {error}") from error

    def solve(self, method: str) -> None:
        """Prunes, where there is a 2:4 part, and finds the directions of what is left."""
        if not self.products.isfinite().all():
            raise ValueError(f"{self.name!r}: a NaN or an infinity entered it")
        if not self.products.any():
            raise ValueError(f"{self.name!r}: zeros alone entered it: calibrate with other batches, or leave it out")
        if self.inputs is not None:
            self.pruned = self.inputs.prune(self.weight.contiguous(), method)
            self.inputs = None
        products, difference = _exact(self.products), self.difference()
        self.total = _energy(_exact(self.weight), products)
        energies, basis = _directions(difference, products)
        left = (_energy(difference, products) - torch.cat([energies.new_zeros(1), energies.cumsum(0)])).clamp(min=0)
        # Those with which the layer is smaller than it was, in parameters and in bytes.
        self.ranks: list[int | None] = [
            rank
            for rank in range(1 if self.pruned is None else 0, len(left))
            if all(self.cost(rank, unit) < self.dense_cost(unit) for unit in (0, 1))
        ]
        self.errors = [self.relative(left[rank]) for rank in self.ranks]
        self.basis = basis[:, : max(self.ranks, default=0)].float()
        if self.pruned is None or not self.ranks:
            self.ranks.append(None)
            self.errors.append(0.0)

    def difference(self) -> torch.Tensor:
        """What the factors stand for."""
        weight = _exact(self.weight)
        return weight if self.pruned is None else weight - _exact(self.pruned)

    def relative(self, energy: float) -> float:
        """An error as a part of the outputs' square."""
        return float(energy) / self.total if self.total else 0.0

    def cost(self, rank: int, unit: int) -> int:
        """Elements (unit 0) or bytes (unit 1) of the layer with factors of a rank."""
        rows, cols = self.shape
        part = (0, 0) if self.pruned is None else _sparse_size(rows, cols, self.weight.dtype)
        return part[unit] + rank * (rows + cols) * (self.weight.element_size() if unit else 1)

    def dense_cost(self, unit: int) -> int:
        """The same of the layer as it is."""
        return self.weight.numel() * (self.weight.element_size() if unit else 1)

    def options(self, unit: int) -> Options:
        """What each rank costs, and the error that it leaves."""
        return Options([self.dense_cost(unit) if rank is None else self.cost(rank, unit) for rank in self.ranks],
                       self.errors)  # fmt: skip

    def within(self, rank: int | str) -> int | None:
        """The rank that is asked for of every layer; ``None`` where the layer stays dense."""
        rows, cols = self.shape
        asked = _amount(rank, "rank", rows * cols)
        if isinstance(rank, str):
            asked //= rows + cols
        asked = min(max(asked, 1), rows, cols)
        if self.ranks[0] is None or any(self.cost(asked, unit) >= self.dense_cost(unit) for unit in (0, 1)):
            return None
        return min(asked, max(each for each in self.ranks if each is not None))

    def replacement(self, rank: int | None) -> tuple[nn.Module | None, FactoredLayer]:
        """The layer of a rank, and what became of the old one."""
        if rank is None:
            return None, self.report(None, 0.0)
        rows, cols = self.shape
        needs_gradient, like = self.layer.weight.requires_grad, dict(device=self.weight.device, dtype=self.weight.dtype)
        left = self.difference()
        sparse = None
        if self.pruned is not None:
            dense = nn.Linear(cols, rows, bias=False, device="meta")
            dense.weight = nn.Parameter(self.pruned, requires_grad=False)
            sparse = Linear.from_dense(dense, name=self.name)
        if rank == 0:
            new = sparse
            new.bias = self.layer.bias
        else:
            directions = self.basis[:, :rank].to(left.dtype)
            q = directions.t() @ left
            # Both factors of a direction have the same norm.
            norms = q.norm(dim=1).sqrt()
            q = q / norms.where(norms > 0, 1.0)[:, None]
            new = LowRankLinear(cols, rows, rank, bias=False, device="meta", dtype=self.weight.dtype)
            new.q.weight = nn.Parameter(q.to(**like), requires_grad=needs_gradient)
            new.s.weight = nn.Parameter((directions * norms).to(**like), requires_grad=needs_gradient)
            new.s.bias = self.layer.bias
            new.sparse = sparse
            left = left - new.s.weight.to(left) @ new.q.weight.to(left)
        error = self.relative(_energy(left, _exact(self.products)))
        try:
            new = take_over(new, self.layer)
        except ValueError as refusal:
            raise ValueError(f"{self.name!r}: {refusal}") from refusal
        for module in new.modules():
            module.training = self.layer.training
        return new, self.report(rank, error)

    def report(self, rank: int | None, error: float) -> FactoredLayer:
        """What became of the layer."""
        after = self.dense_cost(0) if rank is None else self.cost(rank, 0)
        return FactoredLayer(self.name, self.shape, rank, self.tokens, self.dense_cost(0), after, error)


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float64, on the host where its device may not have that."""
    return tensor.to(tensor.device if tensor.device.type == "cuda" else "cpu", torch.float64)


def _energy(matrix: torch.Tensor, products: torch.Tensor) -> float:
    """The square of what a matrix makes of the inputs whose products are given."""
    return max(float((matrix @ products * matrix).sum()), 0.0)


def _directions(matrix: torch.Tensor, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared singular values of ``matrix @ root``, where ``root @ root.T`` is ``products``, in falling order, and
    the left singular vectors: at least one, and those beyond rounding."""
    rows, cols = matrix.shape
    if rows <= cols:
        energies, basis = torch.linalg.eigh(matrix @ products @ matrix.t())
    else:
        values, vectors = torch.linalg.eigh(products)
        image = matrix @ (vectors * values.clamp(min=0).sqrt())
        energies, right = torch.linalg.eigh(image.t() @ image)
        basis = image @ right / energies.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    energies, basis = energies.flip(0).clamp(min=0), basis.flip(1)
    found = max(1, int((energies > _ROUNDING * energies[0]).sum()))
    return energies[:found], basis[:, :found]
