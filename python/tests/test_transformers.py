"""The quantization method "twofour" of transformers, on a small random Llama, offline."""

import json
import os
import subprocess

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

import safetensors.torch  # noqa: E402

import twofour  # noqa: E402
from twofour.transformers import TwoFourConfig  # noqa: E402

COMMAND = os.environ.get("TWOFOUR_COMMAND")


def llama(**changes):
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 54,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "attention_bias": True,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **changes})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def is_linear(name, module):
    return isinstance(module, torch.nn.Linear) and name != "lm_head"


def prune_(model):
    for name, module in model.named_modules():
        if is_linear(name, module):
            module.weight.data = twofour.prune(module.weight.data)
    return model


TOKENS = torch.arange(24).view(2, 12)


def logits(model):
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits


def load(folder, **arguments):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **arguments)


def test_a_dense_checkpoint_is_pruned_while_loading(tmp_path, device):
    dense = llama()
    dense.save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=TwoFourConfig(prune=True), dtype=torch.float32).to(device)
    converted = [name for name, module in model.named_modules() if isinstance(module, twofour.Linear)]
    assert len(converted) == 14 and isinstance(model.lm_head, torch.nn.Linear)
    expected = logits(prune_(dense))
    torch.testing.assert_close(logits(model).cpu(), expected, rtol=1e-4, atol=1e-4)
    # One copy of each weight, and none of them dense.
    layer = model.model.layers[0].mlp.up_proj
    assert [name for name, _ in layer.named_buffers()] == ["weight_packed"]
    assert sum(t.numel() for t in layer.buffers()) < 0.75 * 64 * 54

    before = logits(model)
    model.save_pretrained(tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "twofour"
    again = load(tmp_path / "small").to(device)
    assert torch.equal(logits(again), before)
    again.save_pretrained(tmp_path / "twice")
    names = ["small", "twice"]
    small, twice = (safetensors.torch.load_file(tmp_path / name / "twofour-model.safetensors") for name in names)
    assert small.keys() == twice.keys() and all(torch.equal(small[key], twice[key]) for key in small)
    assert small["model.layers.1.mlp.down_proj.weight.meta"].dtype == torch.uint32
    assert torch.equal(logits(load(tmp_path / "twice").to(device)), before)
    # The format is the package's own.
    tensors = twofour.load_file(tmp_path / "small")
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"].to_dense().cpu(), dense.model.layers[0].mlp.up_proj.weight)
    assert len([t for t in tensors.values() if hasattr(t, "packed_weight")]) == 14


def load_pruned(folder):
    llama().save_pretrained(folder / "dense")
    return load(folder / "dense", quantization_config=TwoFourConfig(prune=True), dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_shards(tmp_path, dtype):
    prune_(llama().to(dtype)).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=TwoFourConfig(), dtype=dtype)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == dtype
    model.save_pretrained(tmp_path / "small", max_shard_size="20KB")
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 1
    again = load(tmp_path / "small")
    assert again.dtype == dtype and torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("size", ["3KB", "20KB"])
def test_the_command_reads_shards(tmp_path, size):
    """Whose manifests list the weights of all shards; a small one lies apart from its metadata."""
    model = load_pruned(tmp_path)
    model.save_pretrained(tmp_path / "shards", max_shard_size=size)
    index = json.loads((tmp_path / "shards" / "twofour-model.safetensors.index.json").read_text())["weight_map"]
    weights = [name.removesuffix(".values") for name in index if name.endswith(".weight.values")]
    apart = [name for name in weights if index[f"{name}.values"] != index[f"{name}.meta"]]
    assert len(weights) == 14 and len(set(index.values())) > 2 and (apart or size != "3KB")
    tensors = twofour.load_file(tmp_path / "shards")
    assert len([t for t in tensors.values() if hasattr(t, "packed_weight")]) == 14
    for name in weights:
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(tensors[name].to_dense(), layer.to_dense().weight)
    with pytest.raises(ValueError, match="read through its index"):
        twofour.load_file(tmp_path / "shards" / index[f"{weights[0]}.values"])


def test_a_checkpoint_that_is_not_2_4_is_an_error(tmp_path):
    model = prune_(llama())
    model.model.layers[1].mlp.gate_proj.weight.data[7, 8:12] = 1.0
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tensor `model.layers.1.mlp.gate_proj.weight`: row 7, group 2: 4 non-zeros.*prune=True"):
        load(tmp_path, quantization_config=TwoFourConfig())
    model = load(tmp_path, quantization_config=TwoFourConfig(modules_to_not_convert=["gate_proj", "lm_head"]))
    assert isinstance(model.model.layers[1].mlp.gate_proj, torch.nn.Linear)
    assert isinstance(model.model.layers[1].mlp.up_proj, twofour.Linear)


def test_what_is_not_converted(tmp_path):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "dense")
    tied = load(tmp_path / "dense", quantization_config=TwoFourConfig(prune=True))
    assert isinstance(tied.lm_head, torch.nn.Linear) and tied.lm_head.weight is tied.model.embed_tokens.weight
    tied.save_pretrained(tmp_path / "small")
    assert torch.equal(logits(load(tmp_path / "small")), logits(tied))
    llama().save_pretrained(tmp_path / "untied")
    every = load(tmp_path / "untied", quantization_config=TwoFourConfig(modules_to_not_convert=[], prune=True))
    assert isinstance(every.lm_head, twofour.Linear)
    some = load(tmp_path / "untied", quantization_config=TwoFourConfig([r"model.layers.0.*", "lm_head"], prune=True))
    converted = {name for name, module in some.named_modules() if isinstance(module, twofour.Linear)}
    assert converted and all(name.startswith("model.layers.1.") for name in converted)
    some.save_pretrained(tmp_path / "some")
    assert torch.equal(logits(load(tmp_path / "some")), logits(some))


def test_damaged_weights_are_named(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    load(tmp_path / "dense", quantization_config=TwoFourConfig(prune=True)).save_pretrained(tmp_path / "small")
    path = tmp_path / "small" / "twofour-model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[f"{name}.meta"] = torch.zeros_like(tensors[f"{name}.meta"].view(torch.int32)).view(torch.uint32)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"`{name}`: row 0, group 0: metadata code 0x0"):
        load(tmp_path / "small")


def test_dequantize_and_adapters(tmp_path):
    prune_(llama()).save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=TwoFourConfig())
    embeddings = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    model(inputs_embeds=embeddings).logits.square().sum().backward()
    reference = load(tmp_path)
    same = embeddings.detach().clone().requires_grad_()
    reference(inputs_embeds=same).logits.square().sum().backward()
    torch.testing.assert_close(embeddings.grad, same.grad, rtol=1e-3, atol=1e-3)
    expected = logits(model)
    dense = model.dequantize()
    assert isinstance(dense.model.layers[0].mlp.up_proj, torch.nn.Linear)
    torch.testing.assert_close(logits(dense), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"), [({"prune": "yes"}, "prune must be"), ({"modules_to_not_convert": "lm_head"}, "must be a list")]
)
def test_config_is_checked(fields, message):
    with pytest.raises(TypeError, match=message):
        TwoFourConfig(**fields)


@pytest.mark.skipif(not COMMAND, reason="TWOFOUR_COMMAND names no twofour binary")
def test_the_command_s_files(tmp_path):
    def command(*arguments):
        done = subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def weights(name):
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name / "model.safetensors"

    dense = llama()
    dense.save_pretrained(tmp_path / "dense")
    command("prune", weights("dense"), "-o", weights("pruned"))
    command("compress", weights("pruned"), "-o", weights("small"))
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    (tmp_path / "pruned" / "config.json").write_text(json.dumps(config))
    kept = twofour.load_file(tmp_path / "small")
    linear = [name for name, module in dense.named_modules() if isinstance(module, torch.nn.Linear)]
    left_dense = [name for name in linear if not hasattr(kept[f"{name}.weight"], "packed_weight")]
    assert len(left_dense) < len(linear)
    config["quantization_config"] = {"quant_method": "twofour", "modules_to_not_convert": left_dense}
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    model = load(tmp_path / "small")
    torch.testing.assert_close(logits(model), logits(load(tmp_path / "pruned")), rtol=1e-4, atol=1e-4)
    # The other way round.
    model.save_pretrained(tmp_path / "again")
    command("decompress", weights("again"), "-o", weights("plain"))
    plain, pruned = twofour.load_file(tmp_path / "plain"), twofour.load_file(tmp_path / "pruned")
    assert plain.keys() == pruned.keys() and all(torch.equal(plain[name], pruned[name]) for name in plain)
