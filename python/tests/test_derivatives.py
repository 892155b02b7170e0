"""Derivatives of any order, in both modes and under torch.func: those of dense layers with the weight that is
multiplied."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import twofour
from twofour import operators
from twofour.operators import masks
from twofour.pretrain import (
    GELUglu,
    SparseLinear,
    SparseLinearTranspose,
    STEPLinear,
    TransposableSparse,
    soft_threshold24,
    sparse24,
)
from twofour.quantization import Int4Linear, QuantizedLinear
from twofour.sparse import to_sparse_semi_structured
from twofour.sparsity import BlockSparseTensor, semi_sparse_weight, sparsify_
from twofour.sparsity.training import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    semi_structured_sparsify,
    semi_structured_sparsify_like,
)

ROWS, COLS, TOKENS = 24, 32, 6


def straight(stand_in, tensor):
    """What is computed with ``stand_in`` and differentiated by ``tensor``."""
    return tensor + (stand_in - tensor).detach()


def of_weight(layer, weight):
    return lambda x: F.linear(x, weight(), layer.bias)


def linear():
    layer = twofour.Linear.from_dense(nn.Linear(COLS, ROWS), prune=True)
    weight = layer.to_dense().weight.detach()
    return layer, of_weight(layer, lambda: weight)


def sparse_weight():
    layer = nn.Linear(COLS, ROWS)
    sparsify_(nn.Sequential(layer), semi_sparse_weight(), prune=True)
    return layer, of_weight(layer, layer.weight.to_dense)


def block_sparse_weight():
    layer = nn.Linear(COLS, ROWS)
    weight = layer.weight.detach().clone()
    weight[8:16, 8:24] = 0
    layer.weight = nn.Parameter(BlockSparseTensor.from_dense(weight, 8), requires_grad=False)
    return layer, of_weight(layer, lambda: weight)


def int4():
    layer = Int4Linear.from_dense(nn.Linear(COLS, ROWS), prune=True)
    return layer, of_weight(layer, layer.to_dense)


def int8():
    layer = QuantizedLinear.from_dense(nn.Linear(COLS, ROWS), prune=True)

    def reference(x):
        scale = x.detach().abs().amax(-1, keepdim=True) / 127
        return F.linear(straight((x.detach() / scale).round() * scale, x), layer.to_dense(), layer.bias)

    return layer, reference


def semi_sparse():
    layer = SemiSparseLinear.from_dense(nn.Linear(COLS, ROWS), algo="largest_abs_values_greedy")
    return layer, of_weight(layer, lambda: straight(layer.weight * layer.mask, layer.weight))


def sparse_activation():
    layer = SemiSparseActivationLinear.from_dense(nn.Linear(COLS, ROWS))

    def reference(x):
        mask = masks.mask_of(operators.select(x.detach(), layer._rule), *x.shape)
        return F.linear(straight(x * mask, x), layer.weight, layer.bias)

    return layer, reference


def s_ste():
    layer = SparseLinear(COLS, ROWS, weight_gradient="dense")
    return layer, of_weight(layer, lambda: straight(layer.get_sparse_weights(), layer.weight))


def fst():
    layer = SparseLinearTranspose(COLS, ROWS, weight_gradient="dense")
    return layer, of_weight(layer, lambda: straight(layer.weight * layer.mask, layer.weight))


def step():
    layer = STEPLinear(COLS, ROWS)
    layer.weight.mask = "sparse"
    return layer, of_weight(layer, lambda: straight(sparse24(layer.weight.detach())[0], layer.weight))


LAYERS = (linear, sparse_weight, block_sparse_weight, int4, int8, semi_sparse, sparse_activation, s_ste, fst, step)


def same(found, expected):
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        b = _dense(b)
        assert a.shape == b.shape and (_dense(a) - b).abs().max() <= 1e-4 * max(1, b.abs().max())


def loss(function):
    return lambda *args: function(*args).tanh().square().sum()


def second_order(function, *tensors):
    """The gradient of the squared gradient."""
    first = torch.autograd.grad(loss(function)(*tensors), tensors, create_graph=True)
    return torch.autograd.grad(sum(_dense(gradient).square().sum() for gradient in first), tensors)


def _dense(tensor):
    return tensor.to_dense() if isinstance(tensor, twofour.sparse.SparseSemiStructuredTensor) else tensor


@pytest.mark.parametrize("make", LAYERS)
def test_the_second_order_is_that_of_the_dense_layer(make):
    layer, reference = make()
    x = torch.randn(TOKENS, COLS, requires_grad=True)
    layer(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    found = second_order(lambda x, *_: layer(x), x, *parameters)
    same(found, second_order(lambda x, *_: reference(x), x, *parameters))
    assert found[0].abs().max() > 0.01


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", LAYERS)
def test_forward_mode_is_that_of_the_dense_layer(make, grad):
    layer, reference = make()
    x, tangent = torch.randn(2, TOKENS, COLS)
    layer.requires_grad_(False)
    layer(x)
    with torch.set_grad_enabled(grad):
        expected = torch.func.jvp(reference, (x,), (tangent,))
        same(torch.func.jvp(layer, (x,), (tangent,)), expected)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent)))
    same((dual.primal, dual.tangent), expected)


@pytest.mark.parametrize("make", LAYERS)
def test_transforms_of_torch_func_are_those_of_the_dense_layer(make):
    layer, reference = make()
    x = torch.randn(TOKENS, COLS)
    layer(x)
    f = torch.func
    for transform in (
        lambda function: f.vjp(function, x)[1](torch.ones(TOKENS, ROWS)),
        lambda function: f.jacrev(function)(x),
        lambda function: f.jacfwd(function)(x),
        lambda function: f.hessian(loss(function))(x[:2]),
        lambda function: torch.vmap(function)(torch.stack((x, x.flip(0)))),
        lambda function: torch.vmap(function, in_dims=1)(torch.stack((x, x.flip(0)), 1)),
        lambda function: torch.vmap(f.grad(loss(function)))(torch.stack((x, x.flip(0)))),
    ):
        same(transform(layer), transform(reference))


@pytest.mark.parametrize("make", [semi_sparse, sparse_activation, s_ste, fst, step])
def test_gradients_of_parameters_under_torch_func_are_those_of_backward(make):
    layer, _ = make()
    x = torch.randn(2, TOKENS, COLS)
    parameters = {name: p.detach().clone() for name, p in layer.named_parameters()}

    def of(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).tanh().square().sum()

    layer(x).tanh().square().sum().backward()
    same(torch.func.grad(of)(parameters, x), {name: p.grad for name, p in layer.named_parameters()})
    each = torch.vmap(torch.func.grad(of), (None, 0))(parameters, x)
    single = [torch.func.grad(of)(parameters, one) for one in x]
    same(each, {name: torch.stack([s[name] for s in single]) for name in each})
    stacked = {name: torch.stack((p, 2 * p)) for name, p in parameters.items()}
    if make is fst:
        return  # Its mask is a state of the layer.
    each = torch.vmap(torch.func.grad(of), (0, None))(stacked, x)
    single = [torch.func.grad(of)({name: p[i] for name, p in stacked.items()}, x) for i in range(2)]
    same(each, {name: torch.stack([s[name] for s in single]) for name in each})


@pytest.mark.parametrize("weight_gradient", ["mvue", "mvue-approximate"])
def test_the_derivative_of_an_estimated_weight_gradient_is_that_of_the_dense_one(weight_gradient):
    layers = [SparseLinear(COLS, ROWS, bias=False, weight_gradient=name) for name in (weight_gradient, "dense")]
    layers[1].load_state_dict(layers[0].state_dict())
    x, v = torch.randn(TOKENS, COLS), torch.randn(ROWS, COLS)
    found = []
    for layer in layers:
        # Linear in the weight gradient, so that the estimate itself does not enter.
        y = layer(x.requires_grad_())
        (gradient,) = torch.autograd.grad(y.square().sum(), layer.weight, create_graph=True)
        found.append(torch.autograd.grad((gradient * v).sum(), x)[0])
    same(*found)


OPERATORS = {
    "linear": lambda w, x: F.linear(x, w),
    "mm": lambda w, x: torch.mm(w, x.t()),
    "matmul": lambda w, x: torch.matmul(x.view(2, -1, COLS), w.t()),
    "mv": lambda w, x: w @ x[0],
    "addmm": lambda w, x: torch.addmm(torch.ones(ROWS), x, w.t(), beta=0.5, alpha=2.0),
    "t": lambda w, x: F.linear(x[:, :ROWS], w.t()),
    "to_dense": lambda w, x: F.linear(x, _dense(w)),
}


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_with_a_sparse_tensor_have_the_derivatives_of_the_dense_ones(name, leaf):
    operator = OPERATORS[name]
    sparse = to_sparse_semi_structured(torch.randn(ROWS, COLS), prune=True)
    dense = sparse.to_dense()
    x, tangent = torch.randn(TOKENS, COLS), torch.randn(TOKENS, COLS)
    found = []
    for weight in (sparse.requires_grad_(leaf), dense.requires_grad_(leaf)):
        function = functools.partial(operator, weight)
        inputs = (x.clone().requires_grad_(), *((weight,) if leaf else ()))
        found.append(
            (
                second_order(lambda x, w=weight: operator(w, x), *inputs),
                torch.func.jvp(function, (x,), (tangent,))[1],
                torch.func.hessian(loss(function))(x[:2]),
                torch.vmap(function)(torch.stack((x, tangent))),
            )
        )
    same(*found)


@pytest.mark.parametrize("mode", [None, "ste", "dense", "sparse"])
def test_pruning_and_operators_by_element_have_the_second_order_of_the_dense_ones(mode):
    weight, x = torch.randn(ROWS, COLS, requires_grad=True), torch.randn(TOKENS, COLS, requires_grad=True)
    if mode is None:
        prune = functools.partial(semi_structured_sparsify, algo="largest_abs_values_greedy")
        mask = prune(weight.detach()).mask
    else:
        pattern = semi_structured_sparsify(torch.randn(ROWS, COLS))
        prune, mask = functools.partial(semi_structured_sparsify_like, pattern=pattern, gradient=mode), pattern.mask
    pruned = (lambda w: straight(w * mask, w)) if mode in (None, "ste") else (lambda w: w * mask)
    for by_element in (lambda s: s, lambda s: s * s, torch.relu, lambda s: s + s):
        found = second_order(lambda w, x: F.linear(x, by_element(prune(w)).to_dense()), weight, x)  # noqa: B023
        same(found, second_order(lambda w, x: F.linear(x, by_element(pruned(w))), weight, x))  # noqa: B023
    same(
        second_order(lambda w, x: F.linear(x, prune(w)), weight, x),
        second_order(lambda w, x: F.linear(x, pruned(w)), weight, x),
    )


def _straight_by(function):
    return function, lambda x: straight(function(x.detach()), x)


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (GELUglu(), lambda h: h.chunk(2, -1)[0] * F.gelu(h.chunk(2, -1)[1], approximate="tanh")),
        _straight_by(lambda x: sparse24(x)[0]),
        _straight_by(lambda x: soft_threshold24(x)[0]),
        _straight_by(lambda x: TransposableSparse()(x)[0]),
    ],
    ids=["geglu", "sparse24", "soft_threshold24", "transposable"],
)
def test_functions_of_pretraining_have_the_derivatives_of_their_formulas(function, reference):
    x, tangent = torch.randn(8, COLS), torch.randn(8, COLS)
    for leaf in (x.clone(), x.t().contiguous().t()):
        same(second_order(function, leaf.requires_grad_()), second_order(reference, x.clone().requires_grad_()))
    f = torch.func
    same(f.jvp(function, (x,), (tangent,)), f.jvp(reference, (x,), (tangent,)))
    same(f.jacrev(function)(x[:4]), f.jacrev(reference)(x[:4]))
    same(f.hessian(loss(function))(x[:4]), f.hessian(loss(reference))(x[:4]))


def test_what_has_no_forward_mode_says_so():
    weight = torch.randn(ROWS, COLS)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda w: F.linear(weight, semi_structured_sparsify(w)), (weight,), (weight,))


@pytest.mark.xfail(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 12), reason="torch 2.11 compiles gradients to zeros"
)
@pytest.mark.parametrize("make", [linear, sparse_weight, int4, int8, semi_sparse])
@pytest.mark.parametrize("transform", ["grad", "jacrev"])
def test_compiled_transforms_are_the_eager_ones(make, transform):
    layer, _ = make()
    x = torch.randn(TOKENS, COLS)

    def run():
        return getattr(torch.func, transform)(loss(layer))(x)

    same(torch.compile(run, backend="aot_eager")(), run())


def test_a_compiled_jvp_is_the_eager_one_or_an_error():
    for make in (linear, sparse_weight):
        layer, _ = make()
        layer.requires_grad_(False)
        x, tangent = torch.randn(2, TOKENS, COLS)

        @torch.no_grad()
        def run():
            return torch.func.jvp(layer, (x,), (tangent,))[1]  # noqa: B023

        expected = run()
        try:
            found = torch.compile(run, backend="eager")()
        except Exception as error:
            assert "jvp" in str(error) or "forward" in str(error).lower()
            continue
        same(found, expected)


def test_a_sparse_weight_that_changes_before_the_backward_pass_is_an_error():
    sparse = to_sparse_semi_structured(torch.randn(ROWS, COLS), prune=True)
    other = to_sparse_semi_structured(torch.randn(ROWS, COLS), prune=True)
    x = torch.randn(TOKENS, COLS, requires_grad=True)
    y = F.linear(x, sparse).sum()
    sparse.copy_(other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_checkpointed_layers_have_the_same_gradients():
    for make in LAYERS:
        layer, _ = make()
        x = torch.randn(TOKENS, COLS, requires_grad=True)
        layer(x)
        expected = torch.autograd.grad(layer(x).square().sum(), x)
        for reentrant in (False, True):
            y = checkpoint(layer, x, use_reentrant=reentrant)
            x.grad = None
            y.square().sum().backward()
            same(x.grad, expected[0])


def test_quantized_layers_pass_gradients_on():
    for make in (int4, int8):
        layer, _ = make()
        before = nn.Linear(COLS, COLS)
        layer(before(torch.randn(TOKENS, COLS))).sum().backward()
        same(before.bias.grad, TOKENS * layer.to_dense().sum(0))
