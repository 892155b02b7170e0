"""Layers and sparse weights under what torch does to models: loading, autocast, ``.data``, tracing, counting FLOPs."""

import copy
import io
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
from conftest import close
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

import twofour
from twofour import pretrain
from twofour.quantization import int4_weight_only, int8_dynamic_activation_int8_weight
from twofour.sparse import to_sparse_semi_structured
from twofour.sparsity import apply_fake_sparsity, block_sparse_weight, semi_sparse_weight, sparsify_
from twofour.sparsity.training import SemiSparseActivationLinear, SemiSparseLinear


def with_linear(model):
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, twofour.Linear.from_dense(module, prune=True))
    return model


#: Models of two layers for inference, made from a dense one.
KINDS = {
    "Linear": with_linear,
    "sparse weight": lambda model: sparsify_(model, semi_sparse_weight(), prune=True),
    "sparse weight both ways": lambda model: sparsify_(model, semi_sparse_weight(), prune="optimal"),
    "blocks": lambda model: sparsify_(model, block_sparse_weight(16)),
    "int8": lambda model: twofour.quantize_(model, int8_dynamic_activation_int8_weight(prune=True)),
    "int4": lambda model: twofour.quantize_(apply_fake_sparsity(model), int4_weight_only()),
}

#: Layers that train.
TRAINING = {
    "SemiSparseLinear": SemiSparseLinear,
    "SemiSparseActivationLinear": SemiSparseActivationLinear,
    "S-STE": lambda cols, rows: pretrain.SparseLinear(cols, rows, weight_gradient="dense"),
    "FST": lambda cols, rows: pretrain.SparseLinearTranspose(cols, rows, weight_gradient="dense"),
    "STEP": pretrain.STEPLinear,
}


def dense():
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))


def make(kind):
    return (
        KINDS[kind](dense())
        if kind in KINDS
        else nn.Sequential(TRAINING[kind](32, 48), nn.ReLU(), TRAINING[kind](48, 16))
    )


@pytest.fixture(params=[*KINDS, *TRAINING])
def kind(request):
    return request.param


# Loading.


@pytest.mark.parametrize("order", ["torch, twofour", "twofour, torch"])
def test_state_dicts_load_with_weights_only_after_import_twofour_alone(tmp_path, order):
    tensors = {kind: make(kind).state_dict() for kind in [*KINDS, *TRAINING]}
    tensors["transposed"] = to_sparse_semi_structured(torch.randn(16, 32), prune=True).t()
    tensors["parameter"] = sparsify_(nn.Linear(16, 16), semi_sparse_weight(), prune=True).weight
    torch.save(tensors, tmp_path / "all.pt")
    program = f"""
import sys
import {order}
import torch
state = torch.load(sys.argv[1], weights_only=True)
assert isinstance(state["parameter"], torch.nn.Parameter) and not state["parameter"].requires_grad
assert type(state["sparse weight"]["0.weight"]).__name__ == type(state["parameter"]).__name__ == "SparseSemiStructuredTensorCUSPARSELT"
assert type(state["blocks"]["0.weight"]).__name__ == "BlockSparseTensor"
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "all.pt")], check=True)


def test_models_are_copied_pickled_and_saved(kind):
    model = make(kind).eval()
    x = torch.randn(3, 32)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), expected)
        assert [(name, type(p), p.requires_grad) for name, p in other.named_parameters()] == [
            (name, type(p), p.requires_grad) for name, p in model.named_parameters()
        ]
        assert all(isinstance(p, nn.Parameter) for p in other.parameters())


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_are_loaded(kind, assign):
    model, other = make(kind).eval(), make(kind).eval()
    x = torch.randn(3, 32)
    expected = model(x)
    for state in (model.state_dict(), model.state_dict(keep_vars=True)):
        other.load_state_dict(copy.deepcopy(state), assign=assign)
        assert torch.equal(other(x), expected)
        assert all(isinstance(p, nn.Parameter) for p in other.parameters())


def test_models_go_to_the_device_meta_and_back(kind):
    model = make(kind).eval()
    x = torch.randn(3, 32)
    expected, state = model(x), copy.deepcopy(model.state_dict())
    gone = model.to("meta")
    assert all(t.device.type == "meta" for t in [*gone.parameters(), *gone.buffers()])
    gone.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(gone(x), expected)


# Autocast.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_layers_return_autocasts_type(kind, weight, dtype):
    model = make(kind)
    if kind in KINDS:
        model.to(weight)
    x = torch.randn(3, 32)
    plain = copy.deepcopy(model).float()(x) if kind not in ("int8", "int4") else None
    for given in (x, x.to(dtype)):
        with torch.autocast("cpu", dtype=dtype), torch.no_grad():
            y = model(given)
        assert y.dtype == dtype
        if plain is not None and kind != "SemiSparseActivationLinear":
            close(y, plain.detach(), torch.bfloat16)


@pytest.mark.parametrize("kind", ["Linear", "sparse weight", "sparse weight both ways", "blocks", "int8", "int4"])
def test_compiled_and_exported_models_compute_the_same(kind):
    model = make(kind).eval().requires_grad_(False)
    x = torch.randn(3, 32)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert found.dtype == torch.bfloat16
    close(found, expected)


def test_gradients_pass_through_autocast():
    for kind in ("Linear", "sparse weight", "sparse weight both ways"):
        model = make(kind)
        x = torch.randn(3, 32, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        gradient, x.grad = x.grad, None
        model(x).square().sum().backward()
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, x.grad, rtol=0.1, atol=0.05)


PRODUCTS = {
    "F.linear": lambda w, x, b: F.linear(x, w, b),
    "mm": lambda w, x, b: torch.mm(w, x.t()),
    "mm from the right": lambda w, x, b: torch.mm(x, w.t()),
    "matmul": lambda w, x, b: torch.matmul(w, x.t()),
    "@": lambda w, x, b: x[None] @ w.t(),
    "addmm": lambda w, x, b: torch.addmm(b, x, w.t()),
    "addmm scaled": lambda w, x, b: torch.addmm(b, x, w.t(), beta=0.5, alpha=2),
    "@ of a vector": lambda w, x, b: w @ x[0],
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "types", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_products_under_autocast_have_the_type_of_dense_ones(product, types):
    weight = to_sparse_semi_structured(torch.randn(24, 32).to(types[0]), prune=True)
    x, bias = torch.randn(5, 32).to(types[1]), torch.randn(24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = PRODUCTS[product](weight.to_dense(), x, bias)
        found = PRODUCTS[product](weight, x, bias)
    assert found.dtype == expected.dtype
    close(found, expected, torch.bfloat16)


def test_mv_is_left_alone_by_autocast_on_a_cpu_as_in_torch():
    weight, x = to_sparse_semi_structured(torch.randn(24, 32), prune=True), torch.randn(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mv(weight, x).dtype == torch.mv(weight.to_dense(), x).dtype


# Assigning to ``data``.


@pytest.mark.parametrize("kind", ["Linear", "sparse weight", "sparse weight both ways", "blocks"])
def test_assigning_to_data_changes_what_is_multiplied(kind):
    model, other = make(kind), make(kind)
    x = torch.randn(3, 32)
    for value in (other[0].weight.data, other[0].weight.to_dense()):
        model, taken = make(kind), model.state_dict()
        before = {name: t.to_dense() if name == "0.weight" else t.clone() for name, t in model.state_dict().items()}
        taken = model.state_dict()
        model[0].weight.data = value
        torch.testing.assert_close(model[0].weight.to_dense(), other[0].weight.to_dense())
        torch.testing.assert_close(F.linear(x, model[0].weight), F.linear(x, other[0].weight))
        torch.testing.assert_close(model[0](x) - model[0].bias, F.linear(x, other[0].weight))
        assert not model[0].weight.requires_grad
        if "0.weight" in taken:
            assert isinstance(model[0].weight, nn.Parameter) and torch.equal(
                taken["0.weight"].to_dense(), before["0.weight"]
            )
        torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    model[0].weight.data = model[0].weight.data.to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    assert F.linear(x.bfloat16(), model[0].weight).dtype == torch.bfloat16
    if kind != "blocks":
        with pytest.raises(ValueError, match="2:4"):
            model[0].weight.data = torch.ones(48, 32)
    if kind == "Linear":
        with pytest.raises(RuntimeError, match=r"shape \[8, 32\], the layer's has \[48, 32\]"):
            model[0].weight.data = other[0].weight.to_dense()[:8]


def test_a_weight_is_assigned_to_itself():
    for kind in ("Linear", "sparse weight", "blocks"):
        model = make(kind)
        x = torch.randn(3, 32)
        expected = model(x)
        weight = model[0].weight
        weight.data = weight
        assert torch.equal(model(x), expected)


def test_writing_to_data_in_place_reaches_the_layer():
    layer, other = (make("Linear")[0] for _ in range(2))
    layer.weight.data.copy_(other.weight.data)
    assert torch.equal(layer.to_dense().weight, other.to_dense().weight)


@pytest.mark.parametrize("kind", ["Linear", "int8", "int4"])
def test_averages_copy_packed_weights_and_refuse_to_compute_with_them(kind):
    model, x = nn.Sequential(make(kind), nn.Linear(16, 8)).eval(), torch.randn(3, 32)
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"avg_fn": get_ema_avg_fn(0.9)}):
        averaged = AveragedModel(model, **options)
        for _ in range(3):
            averaged.update_parameters(model)
        torch.testing.assert_close(averaged.eval()(x), model(x))
        averaged = AveragedModel(model, use_buffers=True, **options)
        averaged.update_parameters(model)
        with pytest.raises(
            NotImplementedError, match=r"a buffer of a twofour.Linear.*AveragedModel\(use_buffers=False\)"
        ):
            averaged.update_parameters(model)
        torch.testing.assert_close(averaged.eval()(x), model(x))
    # Weights that were loaded between two updates are followed.
    model[0].load_state_dict(make(kind).state_dict())
    averaged = AveragedModel(nn.Sequential(make(kind), nn.Linear(16, 8)))
    averaged.update_parameters(model)
    torch.testing.assert_close(averaged.eval()(x), model(x))


@pytest.mark.parametrize("kind", ["Linear", "int8", "int4"])
def test_the_buffer_of_a_packed_weight_is_copied_and_never_taken_for_numbers(kind):
    model, x = make(kind).eval(), torch.randn(3, 32)
    expected = model(x)
    (name, buffer), *_ = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("packed"))
    ask = [
        lambda b: b * 0.5,
        lambda b: 1 - b,
        lambda b: b.mean(),
        lambda b: b.lerp_(b, 0.5),
        lambda b: b.data.mul_(2),
        lambda b: b.zero_(),
    ]
    ask += [
        lambda b: torch.lerp(b, b, 0.5),
        lambda b: b.view(-1).add(1),
        lambda b: b.double(),
        lambda b: b.to(torch.int32),
        lambda b: b.to("meta"),
    ]
    ask += [
        lambda b: torch._foreach_mul_([b], [2.0]),
        lambda b: torch.cat([b, b]).sum(),
        lambda b: nn.utils.parameters_to_vector([b]) * 2,
    ]
    ask += [
        lambda b: b.copy_(torch.zeros(b.shape, dtype=torch.float64)),
        lambda b: setattr(b, "data", b.plain.double()),
        lambda b: b.fill_(1),
    ]
    for compute in ask:
        with pytest.raises(
            NotImplementedError, match=r"twofour.Linear, QuantizedLinear or Int4Linear.*layer.to\(...\)"
        ):
            compute(buffer)
    assert torch.equal(model(x), expected)
    for copy_of in (
        buffer.clone(),
        buffer.detach(),
        copy.deepcopy(buffer),
        buffer.to("cpu", copy=True),
        pickle.loads(pickle.dumps(buffer)),
    ):
        assert type(copy_of) is type(buffer) and torch.equal(
            copy_of.plain.view(torch.uint8), buffer.plain.view(torch.uint8)
        )
    # Other weights, as broadcasts and functional calls have them.
    other = make(kind).eval()
    other.load_state_dict({key: value for key, value in model.state_dict().items() if "bias" in key}, strict=False)
    buffers = dict(other.named_buffers())
    found = torch.func.functional_call(model, (dict(other.named_parameters()), buffers), (x,))
    assert torch.equal(found, other(x)) and not torch.equal(found, expected)
    buffer.data = buffers[name].data
    assert torch.equal(model[0](x), other[0](x)) or kind == "int8"
    buffers[name].copy_(buffer)


@pytest.mark.parametrize("kind", ["Linear", "int8", "int4"])
@pytest.mark.parametrize(
    "convert", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.float16), lambda m: m.type(torch.bfloat16)]
)
def test_models_are_cast_or_say_that_they_cannot_be(kind, convert):
    model, x = make(kind).eval(), torch.randn(3, 32)
    expected, model = model(x), convert(model)
    dtype = model[0].weight.dtype
    assert dtype in (torch.float16, torch.bfloat16)
    torch.testing.assert_close(model(x.to(dtype)).float(), expected, rtol=0.05, atol=0.05)
    with pytest.raises(NotImplementedError, match="float64"):
        model.double()(x.double())


@pytest.mark.parametrize("kind", ["Linear", "int8", "int4"])
def test_soups_of_state_dicts_are_errors_unless_masks_are_the_same(kind):
    one, other = make(kind), make(kind)
    mean = {name: ((value.float() + other.state_dict()[name].float()) / 2) for name, value in one.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"meta|int8|uint8|integer"):
        one.load_state_dict(mean)


# Other processes, other files.


def test_models_are_handed_to_other_processes_in_shared_memory(kind):
    model = make(kind).eval().requires_grad_(False)
    model.share_memory()
    tensors = [*model.parameters(), *model.buffers()]
    assert all(t.is_shared() for t in tensors)
    x = torch.randn(3, 32)
    other = pickle.loads(ForkingPickler.dumps(model))
    assert torch.equal(other(x), model(x))
    received = [*other.parameters(), *other.buffers()]
    assert all(t.is_shared() for t in received) and [type(t) for t in received] == [type(t) for t in tensors]
    if kind in ("Linear", "sparse weight", "sparse weight both ways"):
        # The same memory, not a copy of it.
        model[0].weight.copy_(make(kind)[0].weight)
        assert torch.equal(other(x), model(x))


def _compute(model, x, queue):
    queue.put(model(x).tolist())


def test_a_spawned_process_computes_with_the_models():
    models = nn.ModuleList([make(kind) for kind in KINDS]).eval().requires_grad_(False)
    models.share_memory()
    context = torch.multiprocessing.get_context("spawn")
    x, queue = torch.randn(3, 32), context.SimpleQueue()
    model = nn.Sequential(models[0], nn.Linear(16, 32).requires_grad_(False), models[1])
    process = context.Process(target=_compute, args=(model, x, queue))
    process.start()
    found = torch.tensor(queue.get())
    process.join()
    torch.testing.assert_close(found, model(x))


def test_safetensors_saves_layers_and_says_what_to_do_with_sparse_weights(kind, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = make(kind).eval(), make(kind).eval()
    path = str(tmp_path / "model.safetensors")
    if kind in ("sparse weight", "sparse weight both ways", "blocks"):
        with pytest.raises(RuntimeError, match=r"replace a layer whose weight it is by twofour.Linear.from_dense"):
            safetensors.save_model(model, path)
        model, other = (
            (by_layers(net) for net in (model, other)) if kind != "blocks" else (make("Linear"), make("Linear"))
        )
    safetensors.save_model(model, path)
    safetensors.load_model(other, path)
    x = torch.randn(3, 32)
    assert torch.equal(other(x), model(x))


def by_layers(model):
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, twofour.Linear.from_dense(module))
    return model


def test_a_model_of_transformers_with_sparse_weights_is_saved_packed(tmp_path):
    pytest.importorskip("transformers")
    program = """
import sys, torch, transformers
from twofour.sparsity import semi_sparse_weight, sparsify_
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
model = transformers.LlamaForCausalLM(config).eval()
sparsify_(model, semi_sparse_weight(), lambda module, name: name.endswith("_proj"), prune=True)
model.save_pretrained(sys.argv[1])
ids = torch.arange(6)[None]
again = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.testing.assert_close(again(ids).logits, model(ids).logits)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "model")], check=True)


def test_what_asks_for_dense_memory_is_an_error_that_names_the_way():
    for kind in ("sparse weight", "blocks"):
        weight = make(kind)[0].weight
        for ask in (torch.Tensor.data_ptr, torch.Tensor.storage, torch.Tensor.numpy):
            with pytest.raises(RuntimeError, match=r"no dense memory.*twofour.Linear.from_dense"):
                ask(weight)
        for ask in (torch.abs, torch.flatten, lambda w: torch.chunk(w, 2)):
            with pytest.raises(NotImplementedError, match=r"twofour.Linear.from_dense"):
                ask(weight)


@pytest.mark.parametrize("kind", ["Linear", "sparse weight", "sparse weight both ways", "blocks", "int8", "int4"])
def test_peft_adapts_layers_of_floats_and_refuses_those_of_integers_by_name(kind, tmp_path):
    peft = pytest.importorskip("peft")
    model = nn.Sequential(*make(kind), nn.Linear(16, 8))
    base, x = copy.deepcopy(model), torch.randn(3, 32)
    config = peft.LoraConfig(target_modules=["0", "2"], r=4)
    if kind in ("int8", "int4"):
        with pytest.raises(ValueError, match=r"Target module (Quantized|Int4)Linear.* is not supported"):
            peft.get_peft_model(model, config)
        return
    expected = model(x)
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(adapted(x), expected)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(4):
        loss = adapted(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(x), expected)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(again(x), adapted(x))
    # A merged weight would be dense.
    with pytest.raises((ValueError, NotImplementedError), match="to_dense"):
        adapted.merge_and_unload()


# Tracing and counting.


def test_models_are_traced_by_fx(kind):
    model = make(kind).eval()
    x = torch.randn(3, 32)
    expected = model(x)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), expected)
    traced.graph.lint()
    assert torch.equal(copy.deepcopy(traced)(x), expected)


def test_hooks_of_traced_layers_run_once():
    for kind in ("Linear", "int4", "SemiSparseLinear"):
        model = make(kind).eval()
        model[0].register_forward_hook(lambda module, args, y: y + 1)
        x = torch.randn(3, 32)
        assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
        with pytest.raises(TypeError, match="wrap it in torch.nn.Sequential"):
            torch.fx.symbolic_trace(model[0])


@pytest.mark.parametrize("prune", [True, "optimal"])
def test_products_with_sparse_weights_are_traced_by_fx(prune):
    weight = to_sparse_semi_structured(torch.randn(24, 32), prune=prune)

    class Products(nn.Module):
        def forward(self, x):
            return F.linear(x, weight), torch.mm(weight, x.t()), x @ weight.t()

    x = torch.randn(5, 32)
    for found, expected in zip(torch.fx.symbolic_trace(Products())(x), Products()(x), strict=True):
        assert torch.equal(found, expected)


def test_flops_are_those_of_the_dense_model(kind):
    x = torch.randn(4, 32, requires_grad=kind != "int8")
    counts = []
    for model in (dense(), make(kind)):
        model.requires_grad_(kind in TRAINING and model[0].weight.requires_grad)
        with FlopCounterMode(display=False) as counter:
            y = model(x)
            if kind not in ("int8", "int4"):
                y.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
