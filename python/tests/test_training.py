"""Layers that prune in every forward pass: results, gradients, swapping, compilation."""

import contextlib
import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import close
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

from twofour import operators
from twofour.modules import training
from twofour.operators import master
from twofour.operators.master import masked_linear, master_linear, pack_master, pack_masters
from twofour.operators.packed import Packed
from twofour.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUSPARSELT
from twofour.sparsity.training import (
    GRADIENT_TYPE,
    SemiSparseActivationLinear,
    SemiSparseLinear,
    keep_masks,
    semi_structured_sparsify,
    semi_structured_sparsify_like,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)

ALGORITHMS = ["", "largest_values_greedy", "largest_abs_values_greedy", "causal1122", "optimal"]
LEADING = [(), (6,), (2, 1, 4)]
LAYERS = [SemiSparseLinear, SemiSparseActivationLinear]


def pruned(dense, algo=""):
    """What the algorithm keeps of a matrix of any shape, by the sparse tensor class."""
    return SparseSemiStructuredTensor.prune_dense_static_sort(dense.detach(), algo).to_dense()


def reference(layer, x, dy, mask=None):
    """Output and gradients of the dense layer with the mask applied, in float64; the mask is that of the layer's weight
    by default."""
    x, weight = x.detach().double().requires_grad_(), layer.weight.detach().double().requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach().double().requires_grad_()
    if isinstance(layer, SemiSparseLinear):
        sparse = pruned(layer.weight, layer.algo) if mask is None else layer.weight.detach() * mask
        kept = weight + (sparse.double() - weight.detach())
        y = F.linear(x, kept, bias)
    else:
        flat = pruned(x.detach().to(layer.weight.dtype).reshape(-1, x.shape[-1]), layer.algo).double().view(x.shape)
        y = F.linear(x + (flat - x.detach()), weight, bias)
    y.backward(dy.double())
    return y.detach(), x.grad, weight.grad, None if bias is None else bias.grad


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("cls", LAYERS)
def test_results_and_gradients_are_those_of_the_dense_layer_with_the_mask(device, cls, leading, bias):
    for out_features, in_features in ((32, 64), (37, 70)):
        layer = cls(in_features, out_features, bias=bias, device=device)
        x = torch.randn(*leading, in_features, device=device, requires_grad=True)
        dy = torch.randn(*leading, out_features, device=device)
        y = layer(x)
        y.backward(dy)
        expected = reference(layer, x, dy)
        found = (y, x.grad, layer.weight.grad, layer.bias.grad if bias else None)
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.shape == b.shape
                close(a.detach(), b)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                close(layer(x), expected[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_tall_and_wide_layers_train_with_few_tokens_one_after_another(device, bias, dtype):
    """On a GPU, kernels of one layer's gradient and of another's output share a limit of shared memory."""
    outs, ins, tokens = (
        ((8192, 4096, 1000), (64, 384, 768), (8, 1, 17)) if device == "cuda" else ((512,), (64, 384), (8, 1))
    )
    for out_features, in_features, count in itertools.product(outs, ins, tokens):
        layer = SemiSparseLinear(
            in_features, out_features, bias, device=device, dtype=dtype, algo="largest_abs_values_greedy"
        )
        x = torch.randn(count, in_features, device=device, dtype=dtype, requires_grad=True)
        dy = torch.randn(count, out_features, device=device, dtype=dtype)
        layer(x).backward(dy)
        _, expected, *_ = reference(layer, x, dy)
        close(x.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("cls", LAYERS)
def test_types_and_algorithms(device, cls, algo, dtype):
    layer = cls(48, 40, device=device, dtype=dtype, algo=algo)
    x = torch.randn(8, 48, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(8, 40, device=device, dtype=dtype)
    y = layer(x)
    y.backward(dy)
    for a, b in zip((y, x.grad, layer.weight.grad, layer.bias.grad), reference(layer, x, dy), strict=True):
        assert a.dtype == dtype
        close(a.detach(), b)
    assert f"algo={algo!r}" in repr(layer)


def test_only_needed_gradients_are_computed(device):
    for cls in LAYERS:
        layer = cls(16, 8, device=device)
        layer.weight.requires_grad_(False)
        x = torch.randn(4, 16, device=device)
        layer(x).sum().backward()
        assert layer.weight.grad is None and layer.bias.grad is not None
        x.requires_grad_()
        layer.bias.requires_grad_(False)
        layer(x).sum().backward()
        close(x.grad, reference(layer, x, torch.ones(4, 8, device=device))[1])


def test_the_mask_follows_the_weight_and_pruned_elements_have_a_gradient(device):
    layer = SemiSparseLinear(16, 16, bias=False, device=device)
    before = layer.mask
    x = torch.randn(8, 16, device=device)
    layer(x).sum().backward()
    assert (layer.weight.grad[~before] != 0).all()
    with torch.no_grad():
        layer.weight.neg_()
    assert not torch.equal(layer.mask, before)
    close(layer(x).detach(), x.double() @ (layer.weight * layer.mask).detach().double().t())


def test_an_optimizer_step_is_that_of_the_dense_model_with_pruned_weights(device):
    sparse = torch.nn.Sequential(
        torch.nn.Linear(128, 256, bias=False), torch.nn.ReLU(), torch.nn.Linear(256, 128, bias=False)
    ).to(device)
    dense = copy.deepcopy(sparse)
    for layer in (dense[0], dense[2]):
        layer.weight.data = pruned(layer.weight)
    parameters = list(sparse.parameters())
    swap_linear_with_semi_sparse_linear(sparse, {"0": SemiSparseLinear, "2": SemiSparseLinear})
    x, dy = torch.randn(32, 128, device=device), torch.randn(32, 128, device=device)
    y, expected = sparse(x), dense(x)
    y.backward(dy)
    expected.backward(dy)
    close(y.detach(), expected.detach())
    for a, b in zip(sparse.parameters(), dense.parameters(), strict=True):
        close(a.grad, b.grad)
    assert all(a is b for a, b in zip(sparse.parameters(), parameters, strict=True))
    swap_semi_sparse_linear_with_linear(sparse)
    assert [type(m) for m in sparse] == [torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear]
    assert all(a is b for a, b in zip(sparse.parameters(), parameters, strict=True))


def test_conversion_keeps_everything_that_a_layer_has():
    for cls in LAYERS:
        for bias in (False, True):
            linear = torch.nn.Linear(16, 8, bias=bias).eval()
            linear.name_of_mine = "up"
            calls = []
            linear.register_forward_hook(lambda *_: calls.append(1))
            sparse = cls.from_dense(linear, algo="optimal")
            assert (
                type(sparse) is cls and not sparse.training and sparse.name_of_mine == "up" and sparse.algo == "optimal"
            )
            assert sparse.weight is linear.weight and sparse.bias is linear.bias
            sparse(torch.randn(3, 16))
            assert calls == [1]
            expected = sparse.dense_weight() if cls is SemiSparseLinear else linear.weight
            with (
                pytest.warns(UserWarning, match="multiplies all activations")
                if cls is SemiSparseActivationLinear
                else contextlib.nullcontext()
            ):
                again = cls.to_dense(sparse)
            assert type(again) is torch.nn.Linear and torch.equal(again.weight, expected) and again.name_of_mine == "up"
            assert again.__dict__.keys() == linear.__dict__.keys()
            assert torch.equal(copy.deepcopy(sparse)(torch.ones(2, 16)), sparse(torch.ones(2, 16)))
            assert sparse.state_dict().keys() == linear.state_dict().keys()


def model():
    inner = torch.nn.ModuleDict({"up": torch.nn.Linear(16, 32), "down": torch.nn.Linear(32, 16)})
    shared = inner["up"]
    return torch.nn.ModuleDict({"mlp": inner, "norm": torch.nn.LayerNorm(16), "alias": torch.nn.ModuleList([shared])})


def test_swapping_by_name():
    net = model()
    swap_linear_with_semi_sparse_linear(
        net, {"mlp.up": SemiSparseLinear, "mlp.down": SemiSparseActivationLinear}, algo="optimal"
    )
    assert type(net["mlp"]["up"]) is SemiSparseLinear and type(net["mlp"]["down"]) is SemiSparseActivationLinear
    assert net["alias"][0] is net["mlp"]["up"] and net["mlp"]["down"].algo == "optimal"
    with pytest.warns(UserWarning, match="multiplies all activations"):
        swap_semi_sparse_linear_with_linear(net)
    assert {type(m) for m in net["mlp"].values()} == {torch.nn.Linear} and net["alias"][0] is net["mlp"]["up"]
    net = model()
    swap_linear_with_semi_sparse_linear(net["mlp"], {"mlp.up": SemiSparseLinear}, "mlp")
    assert type(net["mlp"]["up"]) is SemiSparseLinear and type(net["mlp"]["down"]) is torch.nn.Linear


def test_swapping_what_cannot_be_swapped_is_an_error_and_changes_nothing():
    net = model()
    with pytest.raises(ValueError, match=r"'mlp.upp' is no module.*'mlp.up'"):
        swap_linear_with_semi_sparse_linear(net, {"mlp.down": SemiSparseLinear, "mlp.upp": SemiSparseLinear})
    assert type(net["mlp"]["down"]) is torch.nn.Linear
    # The peers' own example, which silently does nothing there.
    with pytest.raises(ValueError, match="'seq.0' is no module"):
        swap_linear_with_semi_sparse_linear(torch.nn.Sequential(torch.nn.Linear(8, 8)), {"seq.0": SemiSparseLinear})
    with pytest.raises(ValueError, match="'norm' is a LayerNorm"):
        swap_linear_with_semi_sparse_linear(net, {"norm": SemiSparseLinear})
    for name in ("", "head"):
        with pytest.raises(ValueError, match="the model itself.*from_dense"):
            swap_linear_with_semi_sparse_linear(torch.nn.Linear(8, 8), {name: SemiSparseLinear}, name)
    with pytest.raises(ValueError, match="the model itself.*to_dense"):
        swap_semi_sparse_linear_with_linear(SemiSparseLinear(8, 8))
    with pytest.raises(TypeError, match="must be SemiSparseLinear"):
        swap_linear_with_semi_sparse_linear(net, {"mlp.up": torch.nn.Linear})
    with pytest.raises(RuntimeError, match="Unknown algorithm"):
        swap_linear_with_semi_sparse_linear(net, {"mlp.up": SemiSparseLinear}, algo="best")
    assert {type(m) for m in net["mlp"].values()} == {torch.nn.Linear}


def test_bad_input_is_an_exception(device):
    with pytest.raises(RuntimeError, match="Unknown algorithm"):
        SemiSparseLinear(8, 8, algo="best")
    with pytest.raises(TypeError, match="torch.nn.Linear"):
        SemiSparseLinear.from_dense(torch.nn.Conv2d(1, 1, 1))
    with pytest.raises(TypeError, match="SemiSparseLinear"):
        SemiSparseLinear.to_dense(torch.nn.Linear(8, 8))
    with pytest.raises(ValueError, match="not initialized"):
        SemiSparseLinear.from_dense(torch.nn.LazyLinear(8))
    with pytest.raises(ValueError, match="parametrizations"):
        SemiSparseLinear.from_dense(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8)))
    for cls in LAYERS:
        layer = cls(16, 8, device=device)
        with pytest.raises(RuntimeError, match="cannot be multiplied.*must be 16"):
            layer(torch.randn(3, 12, device=device))
        with pytest.raises(NotImplementedError, match="dtype"):
            layer(torch.randn(3, 16, device=device, dtype=torch.float16))
        with pytest.raises(NotImplementedError, match="float64"):
            cls(16, 8, device=device, dtype=torch.float64)(torch.randn(3, 16, device=device, dtype=torch.float64))
    layer = SemiSparseLinear(16, 8, device=device)
    torch.nn.init.constant_(layer.weight[3, 5:6], torch.nan)
    if device == "cuda":
        # A search would wait for the device.
        assert layer(torch.randn(3, 16, device=device))[:, 3].isnan().all()
        return
    with pytest.raises(ValueError, match="row 3, column 5"):
        layer(torch.randn(3, 16, device=device))


@pytest.mark.parametrize("cls", LAYERS)
def test_autocast(device, cls):
    layer = cls(32, 16, device=device)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    dy = torch.randn(8, 16, device=device)
    y.backward(dy.bfloat16())
    rounded = copy.deepcopy(layer).bfloat16()
    # The mask is that of the master weight, which rounding would change.
    mask = layer.mask if cls is SemiSparseLinear else None
    for a, b in zip(
        (y, x.grad, layer.weight.grad), reference(rounded, x.bfloat16(), dy.bfloat16(), mask), strict=False
    ):
        close(a.detach(), b, torch.bfloat16)
    assert layer.weight.grad.dtype == x.grad.dtype == torch.float32


@pytest.mark.parametrize("algo", ALGORITHMS[1:])
def test_dense_products_of_the_masked_weight_are_those_of_the_packed_one(device, monkeypatch, algo):
    """Small products on a GPU run so: output, gradients and their types are those of sparse products."""
    layer = SemiSparseLinear(72, 40, algo=algo, device=device)
    x, dy = torch.randn(2, 5, 72, device=device), torch.randn(2, 5, 40, device=device)
    # On a CPU, in float32 and where nothing is compiled no product runs dense by itself.
    for linear in (master_linear, masked_linear):
        monkeypatch.setattr(training, "master_linear", linear)
        found = []
        for dtype in (torch.bfloat16, torch.float16, None):
            layer.zero_grad()
            input = x.clone().requires_grad_()
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                y = layer(input)
            y.backward(dy.to(y.dtype))
            gradients = [input.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]
            # Gradients in float32 were computed in autocast's type.
            found += [(value, y.dtype) for value in (y.detach(), *gradients)]
            assert layer.weight.grad.dtype == torch.float32
            assert layer.weight.grad[~layer.mask].abs().sum() > 0
        frozen = copy.deepcopy(layer).requires_grad_(False)
        found.append((frozen(x), torch.float32))
        weights = (layer.weight.detach(),)

        def of_weight(weight):
            return torch.func.functional_call(layer, {"weight": weight}, (x,))

        found.append((torch.func.jvp(of_weight, weights, weights)[1], torch.float32))
        if linear is masked_linear:
            for (a, dtype), (b, _) in zip(found, expected, strict=True):
                assert a.dtype == b.dtype
                close(a, b, dtype)
        expected = found


def masks_of_compiled(model, step, **settings):
    """What a step returns, compiled, and how often its code calls each operator that chooses masks."""
    with torch._inductor.config.patch(force_disable_caches=True, **settings):
        found, codes = run_and_get_code(step, torch.compile(model, fullgraph=True))
    names = ("pack", "pack_together", "select_together")
    return found, {name: sum(code.count(f"ops.twofour.{name}.default(") for code in codes) for name in names}


@pytest.mark.parametrize("dense", [False, True])
def test_a_compiled_model_chooses_the_masks_of_its_layers_with_one_operator(monkeypatch, dense):
    monkeypatch.setattr(master, "runs_dense", lambda *_: dense)
    layers = [SemiSparseLinear(32, 32, algo="largest_abs_values_greedy") for _ in range(3)]
    layers.append(SemiSparseLinear(32, 32, algo="causal1122"))
    model, x = torch.nn.Sequential(*layers), torch.randn(8, 32, requires_grad=True)

    def step(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x).square().sum().backward()
        found = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        x.grad = None
        model.zero_grad()
        return found

    expected = step(model)
    found, counts = masks_of_compiled(model, step)
    for a, b in zip(found, expected, strict=True):
        close(a, b, torch.bfloat16)
    # The layer of another rule has one of its own.
    other = {"pack": 0, "pack_together": 0, "select_together": 2}
    assert counts == (other if dense else {"pack": 1, "pack_together": 1, "select_together": 0})


@pytest.mark.skipif(
    not hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes"), reason="this torch takes one pass"
)
def test_the_pass_stands_beside_another_one():
    seen = []
    model = torch.nn.Sequential(SemiSparseLinear(32, 32), SemiSparseLinear(32, 32))
    x = torch.randn(8, 32, requires_grad=True)
    _, counts = masks_of_compiled(model, lambda model: model(x), post_grad_custom_pre_pass=seen.append)
    assert seen and counts == {"pack": 0, "pack_together": 1, "select_together": 0}


def test_a_weight_that_the_graph_writes_is_packed_where_it_stands():
    layers = [SemiSparseLinear(32, 32, bias=False) for _ in range(2)]
    x = torch.randn(8, 32)

    @torch.no_grad()
    def step(model):
        for layer in model:
            layer._parameters["weight"].mul_(-1)
        return model(x)

    model = torch.nn.Sequential(*layers)
    expected = step(copy.deepcopy(model))
    with torch._inductor.config.patch(force_disable_caches=True):
        found = torch.compile(step, fullgraph=True)(model)
    close(found, expected)


def test_gradient_accumulation_with_masks_chosen_once(device):
    net = torch.nn.Sequential(SemiSparseLinear(32, 48), torch.nn.GELU(), SemiSparseLinear(48, 16, bias=False)).to(
        device
    )
    batches = torch.randn(3, 5, 32, device=device)
    for batch in batches:
        net(batch).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with keep_masks(net):
        for batch in batches:
            net(batch).square().sum().backward()
    for p, gradient in zip(net.parameters(), expected, strict=True):
        close(p.grad, gradient)
    with torch.autocast(device, dtype=torch.bfloat16), keep_masks(net), torch.no_grad():
        kept = net(batches)
    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(net(batches), kept)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="step the optimizer outside"):
        with keep_masks(net):
            optimizer.step()
    assert net[0]._kept is None


def test_masks_that_are_chosen_together_are_those_of_each_layer(device):
    """More layers than a launch takes, of several shapes, rules and types."""
    algos = ["", "largest_abs_values_greedy", "causal1122", "optimal"]
    shapes = [(64, 128), (32, 48), (7, 30), (128, 64)]
    layers = [
        SemiSparseLinear(cols, rows, bias=False, algo=algo, device=device, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for algo in algos
        for rows, cols in shapes * 7
    ]
    for dtype in (None, torch.bfloat16):
        with keep_masks(torch.nn.ModuleList(layers), dtype):
            for layer in layers:
                kept, weight = layer._kept, layer.weight.detach()
                forward, transposed = pack_master(weight, layer._rule, True, dtype or weight.dtype)
                assert kept.is_same(Packed(*weight.shape, forward, transposed))
                expected = weight.masked_fill(~layer.mask, 0).to(kept.dtype)
                assert torch.equal(kept.to_dense(), expected)
                assert torch.equal(Packed(*weight.shape, None, kept.transposed).to_dense(), expected)


def test_what_cannot_be_packed_together_is_an_error(device):
    weights = [torch.randn(8, 8, device=device), torch.randn(8, 8, device=device, dtype=torch.bfloat16)]
    rule = operators.RULES["greedy"]
    with pytest.raises(RuntimeError, match="dimensions"):
        operators.pack_together([weights[0], weights[0][0]], rule, True)
    packed = pack_masters(weights, [rule, rule], [torch.bfloat16, torch.bfloat16])
    assert [forward.dtype for forward, _ in packed] == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cls", LAYERS)
def test_checkpointing_recomputes_with_the_same_mask(device, cls, reentrant):
    net = torch.nn.Sequential(cls(32, 48), torch.nn.ReLU(), cls(48, 16)).to(device)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    net(x).square().sum().backward()
    expected = [t.grad.clone() for t in (x, *net.parameters())]
    x.grad = None
    net.zero_grad()
    checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
    for t, gradient in zip((x, *net.parameters()), expected, strict=True):
        assert torch.equal(t.grad, gradient)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_train_the_same(device, backend):
    net = torch.nn.Sequential(
        SemiSparseLinear(64, 96), torch.nn.ReLU(), SemiSparseActivationLinear(96, 30, bias=False)
    ).to(device)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    for tokens in (8, 13) if backend == "aot_eager" else (8,):
        x = torch.randn(2, tokens, 64, device=device, requires_grad=True)
        gradients = []
        for module in (net, compiled):
            x.grad = None
            net.zero_grad()
            y = module(x)
            y.square().sum().backward()
            gradients.append([y.detach(), x.grad] + [p.grad for p in net.parameters()])
        for a, b in zip(*gradients, strict=True):
            close(b, a)
    if backend == "aot_eager":
        with torch.no_grad():
            close(compiled(x), net(x))


def test_sparsify_prunes_both_ways_and_passes_the_gradient(device):
    for backend, algo in (("cutlass", ""), ("cusparselt", "optimal")):
        x = torch.randn(24, 36, device=device, requires_grad=True)
        y = semi_structured_sparsify(x, algo, backend)
        assert isinstance(y, SparseSemiStructuredTensorCUSPARSELT) == (backend == "cusparselt")
        assert torch.equal(y.to_dense(), pruned(x, algo))
        other, dy = torch.randn(5, 36, device=device), torch.randn(5, 24, device=device)
        F.linear(other, y).backward(dy)
        close(x.grad, dy.double().t() @ other.double())
        again = semi_structured_sparsify(y)
        assert torch.equal(again.to_dense(), y.to_dense())
    with pytest.raises(ValueError, match="unknown backend"):
        semi_structured_sparsify(x, backend="cublas")
    with pytest.raises(RuntimeError, match="Unknown algorithm"):
        semi_structured_sparsify(x, "best")
    with pytest.raises(RuntimeError, match="dim = 3"):
        semi_structured_sparsify(torch.randn(2, 4, 4, device=device))


@pytest.mark.parametrize("gradient", [*GRADIENT_TYPE, "sparse", "STE"])
def test_sparsify_like_has_three_gradients(device, gradient):
    pattern = semi_structured_sparsify(torch.randn(24, 36, device=device))
    x = torch.randn(24, 36, device=device, requires_grad=True)
    y = semi_structured_sparsify_like(x, pattern, gradient)
    assert torch.equal(y.to_dense(), torch.where(pattern.mask, x, 0)) and torch.equal(y.mask, pattern.mask)
    other, dy = torch.randn(5, 36, device=device), torch.randn(5, 24, device=device)
    F.linear(other, y).backward(dy)
    dense = dy.double().t() @ other.double()
    kind = GRADIENT_TYPE(gradient.lower())
    assert isinstance(x.grad, SparseSemiStructuredTensor) == (kind == GRADIENT_TYPE.SPARSE)
    found = x.grad.to_dense() if kind == GRADIENT_TYPE.SPARSE else x.grad
    close(found, dense if kind == GRADIENT_TYPE.STE else dense * pattern.mask)


def test_sparsify_like_refuses_what_does_not_fit(device):
    x = torch.randn(8, 8, device=device)
    pattern = semi_structured_sparsify(x)
    with pytest.raises(ValueError, match="must be a SparseSemiStructuredTensor"):
        semi_structured_sparsify_like(x, x)
    with pytest.raises(ValueError, match=r"\(8, 8\), the tensor \(4, 8\)"):
        semi_structured_sparsify_like(x[:4], pattern)
    with pytest.raises(ValueError, match="GRADIENT_TYPE"):
        semi_structured_sparsify_like(x, pattern, "none")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_sparsify_inside_a_compiled_function(device, backend):
    weight, x = torch.randn(32, 64, device=device, requires_grad=True), torch.randn(5, 64, device=device)

    def function(weight, x):
        return F.linear(x, semi_structured_sparsify(weight, "optimal"))

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    dy = torch.randn(5, 32, device=device)
    y = compiled(weight, x)
    y.backward(dy)
    close(y.detach(), x.double() @ pruned(weight, "optimal").double().t())
    close(weight.grad, dy.double().t() @ x.double())


def test_copies_made_inside_keep_masks_are_not_inside():
    layer = SemiSparseLinear.from_dense(torch.nn.Linear(16, 8), algo="largest_abs_values_greedy")
    x = torch.randn(4, 16)
    with keep_masks(torch.nn.Sequential(layer)):
        copied = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for one in copied:
        before = one(x)
        with torch.no_grad():
            one.weight.neg_().add_(1)
        expected = torch.nn.functional.linear(x, one.weight * one.mask, one.bias)
        assert not torch.equal(one(x), before)
        torch.testing.assert_close(one(x), expected)


def test_a_weight_that_changes_through_data_inside_keep_masks_is_an_error():
    layer = SemiSparseLinear(16, 8)
    with pytest.raises(RuntimeError, match="changed inside keep_masks"), keep_masks(torch.nn.Sequential(layer)):
        layer.weight.data.mul_(-1)
