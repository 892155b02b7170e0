"""Layers of one input that are multiplied as one: twofour.transformers.optimize."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import close
from model_types import BASE, TEXT, T

import twofour
from twofour.integrations.transformers import attention
from twofour.modules.fused import Fused, fuse
from twofour.transformers import optimize, restore

KINDS = {"linear": twofour.Linear, "int4": twofour.Int4Linear}
CONFIGS = {
    "llama": T.LlamaConfig,
    "qwen2": T.Qwen2Config,
    "qwen3": T.Qwen3Config,
    "mistral": T.MistralConfig,
    "gemma2": T.Gemma2Config,
}


def sparse_model(name, kind, dtype=torch.float32):
    model = T.AutoModelForCausalLM.from_config(CONFIGS[name](**TEXT)).eval().to(dtype)
    for path, layer in list(model.model.named_modules()):
        if type(layer) is torch.nn.Linear:
            if layer.bias is not None:
                torch.nn.init.normal_(layer.bias)
            model.model.set_submodule(path, KINDS[kind].from_dense(layer, prune=True))
    return model


def fused(model):
    return sum(isinstance(module, Fused) for module in model.modules())


IDS = torch.arange(1, 15).view(2, 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_an_optimized_model_computes_and_saves_what_it_did(name, kind, tmp_path):
    model = sparse_model(name, kind)
    expected, state = model(IDS).logits, {key: value.clone() for key, value in model.state_dict().items()}
    size = sum(buffer.nbytes for buffer in model.buffers())
    assert optimize(optimize(model)) is model and fused(model) == 10
    close(model(IDS).logits, expected)
    assert sum(buffer.nbytes for buffer in model.buffers()) <= 1.05 * size
    found = model.state_dict()
    assert list(found) == list(state) and all(torch.equal(found[key], state[key]) for key in state)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fused(same) == 0
        close(same(IDS).logits, expected)
    model.save_pretrained(tmp_path)
    close(T.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(IDS).logits, expected)
    model.to("cpu", torch.float32)
    assert fused(model) == 10
    assert fused(restore(model)) == 0
    assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize(("name", "is_compiled"), [*((name, False) for name in CONFIGS), ("llama", True)])
@torch.no_grad()
def test_an_optimized_model_decodes_what_it_did(name, is_compiled):
    model = sparse_model(name, "linear")
    model.set_attn_implementation("sdpa" if name != "gemma2" else "eager")
    padded = torch.ones_like(IDS)
    padded[1, :3] = 0

    def decoded():
        torch._dynamo.reset()
        cache, found = T.StaticCache(config=model.config, max_cache_len=16), []
        call = torch.compile(model, backend="aot_eager") if is_compiled else model
        for place in (torch.arange(5), torch.tensor([5]), torch.tensor([6])):
            mask = padded[:, : int(place[-1]) + 1]
            found.append(call(IDS[:, place], attention_mask=mask, past_key_values=cache, cache_position=place).logits)
        # The first text's, and what follows the padding of the second.
        return [torch.cat([logits[0], logits[1, -1:]]) for logits in found]

    expected = decoded()
    optimize(model)
    for found, each in zip(decoded(), expected, strict=True):
        close(found, each)
    assert model.config._attn_implementation == ("eager" if name == "gemma2" else "twofour")
    assert restore(model).config._attn_implementation == ("eager" if name == "gemma2" else "sdpa")


def test_a_new_token_reads_keys_and_values_once(monkeypatch):
    model, shapes = optimize(sparse_model("llama", "linear")), []
    standard = torch.nn.functional.scaled_dot_product_attention

    def seen(query, key, *others, **options):
        shapes.append((query.shape[1], query.shape[2], key.shape[1]))
        return standard(query, key, *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    with torch.no_grad():
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    groups = TEXT["num_attention_heads"] // TEXT["num_key_value_heads"]
    assert groups > 1 and (TEXT["num_key_value_heads"], groups, TEXT["num_key_value_heads"]) in shapes


def test_models_that_ask_for_the_name_of_their_attention_keep_it():
    for config, name in ((T.FalconConfig(**BASE), "sdpa"), (T.LlamaConfig(**TEXT), "twofour")):
        model = T.AutoModelForCausalLM.from_config(config)
        assert model.config._attn_implementation == "sdpa"
        attention.group_queries(model)
        assert model.config._attn_implementation == name


def test_models_inside_of_others_get_the_attention():
    inner = torch.nn.Module()
    inner.model = sparse_model("llama", "linear")
    optimize(inner)
    assert inner.model.config._attn_implementation == "twofour"
    restore(inner)
    assert inner.model.config._attn_implementation == "sdpa"


def test_sinks_are_not_left_out():
    with pytest.raises(NotImplementedError, match="sinks"):
        attention.grouped_attention(torch.nn.Module(), *[torch.randn(1, 2, 1, 8)] * 3, None, s_aux=torch.zeros(2))


PROGRAM = """
import sys
import torch
model = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    model(torch.arange(1, 8)[None])
assert model.config._attn_implementation == "twofour"
"""


def test_a_pickled_model_runs_in_a_new_process(tmp_path):
    model = optimize(sparse_model("llama", "linear")).to(torch.bfloat16)
    assert fused(model) == 0
    torch.save(model, tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "model.pt"], check=True)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("batch", "queries"), [(3, 1), (1, 1), (3, 2)])
def test_attention_of_grouped_queries_is_that_of_each_query(batch, queries, is_masked):
    module = torch.nn.Module()
    module.num_key_value_groups = 4
    query, key, value = torch.randn(batch, 8, queries, 16), torch.randn(3, 2, 9, 16), torch.randn(3, 2, 9, 24)
    mask = torch.rand(3, 1, queries, 9) < 0.7 if is_masked else None
    found, expected = (
        function(module, query, key, value, mask, scaling=0.3)[0]
        for function in (attention.grouped_attention, attention.sdpa_attention_forward)
    )
    assert found.shape == expected.shape
    close(found, expected)


@torch.no_grad()
def test_an_encoder_multiplies_what_attention_reads_as_one():
    model = T.BertModel(T.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)).eval()
    for path, layer in list(model.encoder.named_modules()):
        if type(layer) is torch.nn.Linear:
            model.encoder.set_submodule(path, twofour.Linear.from_dense(layer, prune=True))
    other = torch.randn(2, 3, TEXT["hidden_size"])
    expected = model(IDS, encoder_hidden_states=other).last_hidden_state
    optimize(model)
    close(model(IDS, encoder_hidden_states=other).last_hidden_state, expected)
    # Keys and values of the other text are not those of the queries' text.
    assert fused(model) == 3 * TEXT["num_hidden_layers"]


@torch.no_grad()
def test_what_replaces_weights_undoes_it_and_computes_the_same():
    model, other = sparse_model("qwen2", "linear"), sparse_model("qwen2", "linear")
    expected = other(IDS).logits
    optimize(model).load_state_dict(other.state_dict())
    assert fused(model) == 0
    close(model(IDS).logits, expected)
    optimize(model).to(torch.bfloat16)
    assert fused(model) == 0
    close(model(IDS).logits, expected)
    layer = optimize(model).model.layers[0].self_attn.k_proj
    layer.weight.data = other.model.layers[1].self_attn.k_proj.weight.data.to(torch.bfloat16)
    assert torch.equal(layer.dense_weight(), other.model.layers[1].self_attn.k_proj.dense_weight().bfloat16())
    assert fused(model) == 7


def test_compiled_models_multiply_once_for_each_group():
    model = optimize(sparse_model("qwen2", "linear"))
    products = []

    def backend(graph, _):
        products.append(sum("linear" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph.forward

    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True)(IDS, use_cache=False).logits
        close(found, model(IDS).logits)
    # Of each of two blocks four weights instead of seven, and the head.
    assert products == [9]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_group_compute_for_themselves_in_any_order_and_have_gradients(kind):
    dense = [torch.nn.Linear(64, rows) for rows in (32, 8, 16)]
    alone = [KINDS[kind].from_dense(layer, prune=True) for layer in dense]
    group = copy.deepcopy(alone)
    fuse(group)
    for x in (torch.randn(3, 64), torch.randn(2, 3, 64)):
        for order in ((0, 1, 2), (2, 1, 0), (1, 1, 0), (2,)):
            for i in order:
                close(group[i](x), alone[i](x))
    x = torch.randn(3, 64)
    group[0](x)
    x.mul_(2)
    close(group[1](x), alone[1](x))
    x, y = torch.randn(3, 64, requires_grad=True), torch.randn(3, 32)
    wanted = [x, *([alone[0].bias] if kind == "linear" else [])]
    expected = torch.autograd.grad(alone[0](x), wanted, y)
    wanted = [x, *([group[0].bias] if kind == "linear" else [])]
    for found, each in zip(torch.autograd.grad(group[0](x), wanted, y), expected, strict=True):
        close(found, each)
    with torch.autocast("cpu", torch.bfloat16):
        assert group[0](x).dtype is torch.bfloat16
        close(group[0](x), alone[0](x))
    with torch.no_grad():
        group[0](x)
    assert group[1](x).requires_grad
    group[0](x)
    with torch.no_grad():
        group[1].bias.zero_()
        close(group[1](x), alone[1](x) - alone[1].bias)


def test_models_without_such_layers_are_refused():
    model = T.AutoModelForCausalLM.from_config(T.LlamaConfig(**TEXT))
    with pytest.raises(ValueError, match="v_proj; query, key, value; gate_proj, up_proj, are not all twofour.Linear"):
        optimize(model)
    with pytest.raises(ValueError, match="do not exist"):
        optimize(torch.nn.Sequential(torch.nn.Linear(8, 8)))
