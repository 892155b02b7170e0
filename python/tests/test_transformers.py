"""The quantization method "twofour" of transformers, on a small random Llama, offline."""

import json
import os
import pathlib
import types

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

import safetensors.torch  # noqa: E402

import twofour  # noqa: E402
from twofour.transformers import TwoFourConfig  # noqa: E402


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
    assert torch.equal(
        tensors["model.layers.0.mlp.up_proj.weight"].to_dense().cpu(), dense.model.layers[0].mlp.up_proj.weight
    )
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
    with pytest.raises(
        ValueError, match=r"tensor `model.layers.1.mlp.gate_proj.weight`: row 7, group 2: 4 non-zeros.*prune=True"
    ):
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
    ("fields", "message"),
    [({"prune": "yes"}, "prune must be"), ({"modules_to_not_convert": "lm_head"}, "must be a list")],
)
def test_config_is_checked(fields, message):
    with pytest.raises(TypeError, match=message):
        TwoFourConfig(**fields)


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, twofour.Linear)]


@pytest.mark.parametrize(
    ("unknown", "close"),
    [
        ("lm_hed", "`lm_head`"),
        ("model.layers.7", "`model.layers.1`"),
        ("up_prj", "`up_proj`"),
        ("zzz", "there are .*`k_proj`"),
    ],
)
def test_names_that_match_nothing_are_an_error(tmp_path, unknown, close):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"`{unknown}` matches no module of LlamaForCausalLM; .*{close}"):
        load(tmp_path, quantization_config=TwoFourConfig(["lm_head", unknown], prune=True))
    with pytest.raises(ValueError, match=r"`\(` is no regular expression"):
        TwoFourConfig(["("])


def test_layers_that_stay_dense_are_named(tmp_path):
    torch.manual_seed(0)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
    gpt2.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(
        ValueError,
        match=r"no layer of GPT2LMHeadModel can become 2:4: 4 of Conv1D, such as `transformer.h.0.attn.c_attn`: .*\[in_f",
    ):
        load(tmp_path / "gpt2", quantization_config=TwoFourConfig(prune=True))
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**settings, num_key_value_heads=2, num_local_experts=4)
    )
    mixtral.save_pretrained(tmp_path / "mixtral")
    with pytest.warns(
        UserWarning,
        match="1 of MixtralExperts, such as `model.layers.0.mlp.experts`: the weights of all experts are one tensor",
    ):
        model = load(tmp_path / "mixtral", quantization_config=TwoFourConfig(prune=True))
    assert len(converted(model)) == 4
    falcon = transformers.FalconForCausalLM(
        transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    )
    falcon.save_pretrained(tmp_path / "falcon")
    assert len(converted(load(tmp_path / "falcon", quantization_config=TwoFourConfig(prune=True)))) == 4


class Pair(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.one = self.two = layer


def test_a_module_with_two_names_is_one_layer(tmp_path):
    llama(attention_bias=False).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=TwoFourConfig(prune=True), dtype=torch.float32)
    attention = model.model.layers[1].self_attn
    attention.k_proj = attention.v_proj
    model.save_pretrained(tmp_path / "shared")
    again = load(tmp_path / "shared")
    assert torch.equal(logits(again), logits(model))
    # And while a dense checkpoint is read.
    from twofour.integrations.transformers import _replace

    dense = torch.nn.Linear(8, 4)
    pair = Pair(dense)
    _replace(pair, dense, twofour.Linear.from_dense(dense, prune=True))
    assert pair.one is pair.two and isinstance(pair.one, twofour.Linear)


def names(folder):
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix == ".safetensors" or "index" in path.name or "README" in path.name
    )


def test_names_of_files_and_what_was_there_before(tmp_path):
    model, dense = load_pruned(tmp_path), llama()
    folder = tmp_path / "folder"
    dense.save_pretrained(folder, max_shard_size="20KB")
    assert "model.safetensors.index.json" in names(folder)
    model.save_pretrained(folder)
    assert names(folder) == ["README-twofour.md", "twofour-model.safetensors"]
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(names(folder)) > 3 and all(name.startswith(("README", "twofour-model")) for name in names(folder))
    assert torch.equal(logits(load(folder)), logits(model))
    dense.save_pretrained(folder)
    assert names(folder) == ["model.safetensors"] and torch.equal(logits(load(folder)), logits(dense))
    # A checkpoint that transformers without the package would load in the place of the packed one.
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="pytorch_model.bin, which would be loaded"):
        model.save_pretrained(folder)
    assert torch.equal(logits(load(folder)), logits(dense))
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []


class Killed(BaseException):
    """What ends a process between two steps."""


@pytest.mark.parametrize(("before", "after"), [("20KB", "20KB"), ("20KB", "5GB"), ("5GB", "20KB"), ("5GB", "5GB")])
def test_a_save_over_another_model_that_is_killed_leaves_one_model_or_none(tmp_path, monkeypatch, before, after):
    old, new = (twofour.sparsity.sparsify_(prune_(llama()), twofour.sparsity.semi_sparse_weight()) for _ in range(2))
    torch.nn.init.normal_(new.lm_head.weight)
    replace, was_killed = os.replace, True
    step = 0
    while was_killed:
        folder, left = tmp_path / str(step), step
        old.save_pretrained(folder, max_shard_size=before)

        def interrupted(*paths):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return replace(*paths)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", interrupted)
            try:
                new.save_pretrained(folder, max_shard_size=after)
                was_killed = False
            except Killed:
                pass
        if was_killed:
            with pytest.raises((OSError, ValueError)):
                load(folder)
            new.save_pretrained(folder, max_shard_size=after)
        assert torch.equal(logits(load(folder)), logits(new)) and not torch.equal(logits(new), logits(old))
        step += 1
    assert step >= 3


def test_saving_layers_that_prune_in_training_warns_that_their_masters_are_saved(tmp_path):
    from twofour.sparsity.training import SemiSparseLinear, swap_linear_with_semi_sparse_linear

    model = llama().eval()
    swap_linear_with_semi_sparse_linear(model, dict.fromkeys(twofour.linear_layers(model), SemiSparseLinear))
    expected = logits(model)
    with pytest.warns(
        UserWarning,
        match=r"14 layers, such as the SemiSparseLinear `model.layers.0.self_attn.q_proj`.*dense master weights",
    ):
        model.save_pretrained(tmp_path / "masters")
    # Training goes on from them.
    again = load(tmp_path / "masters")
    swap_linear_with_semi_sparse_linear(again, dict.fromkeys(twofour.linear_layers(again), SemiSparseLinear))
    assert torch.equal(logits(again), expected)
    # What was trained, packed.
    twofour.sparsity.sparsify_(model, twofour.sparsity.semi_sparse_weight())
    model.save_pretrained(tmp_path / "trained")
    torch.testing.assert_close(logits(load(tmp_path / "trained")), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_subfolders_variants_and_snapshots_of_the_hub(tmp_path, size):
    model = load_pruned(tmp_path)
    expected = logits(model)
    model.save_pretrained(tmp_path / "sub" / "folder", max_shard_size=size)
    assert torch.equal(logits(load(tmp_path / "sub", subfolder="folder")), expected)
    assert torch.equal(logits(load(tmp_path / "sub" / "folder", use_safetensors=True)), expected)
    model.save_pretrained(tmp_path / "variant", variant="fp16", max_shard_size=size)
    assert torch.equal(logits(load(tmp_path / "variant", variant="fp16")), expected)
    snapshot, revision = tmp_path / "hub" / "models--org--name", "a" * 40
    (snapshot / "refs").mkdir(parents=True)
    (snapshot / "refs" / "main").write_text(revision)
    model.save_pretrained(snapshot / "snapshots" / revision, max_shard_size=size)
    assert torch.equal(logits(load("org/name", cache_dir=tmp_path / "hub")), expected)


def test_old_names_and_configurations_that_say_nothing(tmp_path):
    model = load_pruned(tmp_path)
    for folder, name in [(tmp_path / "new", "twofour-model.safetensors"), (tmp_path / "old", "model.safetensors")]:
        model.save_pretrained(folder)
        (folder / "twofour-model.safetensors").rename(folder / name)
        assert torch.equal(logits(load(folder)), logits(model))
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        # Never layers that are initialized at random.
        with pytest.raises(
            ValueError, match="hold packed weights, which config.json does not say; pass quantization_config"
        ):
            load(folder)
        assert torch.equal(logits(load(folder, quantization_config=TwoFourConfig())), logits(model))


def test_weights_without_a_manifest_are_read(tmp_path):
    """Earlier versions wrote none for models whose tensors transformers renames."""
    model = load_pruned(tmp_path)
    model.save_pretrained(tmp_path / "old")
    tensors = safetensors.torch.load_file(tmp_path / "old" / "twofour-model.safetensors")
    (tmp_path / "old" / "twofour-model.safetensors").unlink()
    safetensors.torch.save_file(tensors, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    again = load(tmp_path / "old")
    assert converted(again) == converted(model) and torch.equal(logits(again), logits(model))


def test_a_packed_base_model_takes_a_new_head_and_joins_another(tmp_path):
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    transformers.BertModel(transformers.BertConfig(**settings)).save_pretrained(tmp_path / "dense")
    base = transformers.BertModel.from_pretrained(tmp_path / "dense", quantization_config=TwoFourConfig(prune=True))
    base.save_pretrained(tmp_path / "base")
    model, info = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "base", output_loading_info=True
    )
    assert (
        info["missing_keys"] == {"classifier.weight", "classifier.bias"}
        and len(converted(model)) == len(converted(base)) == 6
    )
    assert 0 < model.classifier.weight.std() < 0.1
    joined = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "base", tmp_path / "base")
    joined.config.decoder_start_token_id = joined.config.pad_token_id = 0
    joined.save_pretrained(tmp_path / "joined")
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "joined")
    with torch.no_grad():
        one, other = (found(input_ids=TOKENS, decoder_input_ids=TOKENS).logits for found in (joined.eval(), again))
    assert torch.equal(one, other) and converted(again) == converted(joined)


@pytest.mark.parametrize(
    "quantized",
    [
        twofour.quantization.int8_dynamic_activation_int8_weight(prune=True),
        twofour.quantization.int4_weight_only(-1, prune=True),
    ],
)
def test_integers_are_saved_loaded_and_dequantized(tmp_path, quantized):
    model = llama()
    twofour.quantization.quantize_(model, quantized, lambda module, name: is_linear(name, module))
    model.save_pretrained(tmp_path / "integers")
    # Saving changes nothing of the model.
    assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")
    assert names(tmp_path / "integers") == ["README-twofour.md", "twofour-model.safetensors"]
    again = load(tmp_path / "integers")
    assert torch.equal(logits(again), logits(model))
    weights = {name: module.to_dense() for name, module in again.named_modules() if hasattr(module, "stored_dtype")}
    assert len(weights) == 14
    dense = again.dequantize()
    assert all(torch.equal(dense.get_submodule(name).weight, weight) for name, weight in weights.items())
    dense.save_pretrained(tmp_path / "dense")
    assert names(tmp_path / "dense") == ["model.safetensors"] and "quantization_config" not in json.loads(
        (tmp_path / "dense" / "config.json").read_text()
    )
    assert torch.equal(logits(load(tmp_path / "dense")), logits(dense))


def test_sparse_parameters_and_single_layers_are_saved_packed(tmp_path):
    model = prune_(llama())
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = torch.nn.Parameter(
        twofour.sparse.to_sparse_semi_structured(mlp.up_proj.weight.detach()), requires_grad=False
    )
    mlp.down_proj = twofour.Linear.from_dense(mlp.down_proj)
    expected = logits(model)
    model.save_pretrained(tmp_path / "some")
    again = load(tmp_path / "some")
    assert converted(again) == ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)


def test_push_to_hub_uploads_the_same_files(tmp_path, monkeypatch):
    model, uploaded = load_pruned(tmp_path), []
    monkeypatch.setattr(
        transformers.utils.hub,
        "create_and_tag_model_card",
        lambda *args, **kwargs: types.SimpleNamespace(save=lambda path: None),
    )
    hub = types.SimpleNamespace(create_repo=lambda repo_id, **kwargs: types.SimpleNamespace(repo_id=repo_id))
    for module in (transformers.utils.hub, transformers.modeling_utils):
        monkeypatch.setattr(module, "hf_api", lambda *args, **kwargs: hub)
    monkeypatch.setattr(
        type(model),
        "_upload_modified_files",
        lambda self, folder, repo, *args, **kwargs: uploaded.append((repo, names(pathlib.Path(folder)))),
    )
    expected = ["README-twofour.md", "twofour-model.safetensors"]
    model.push_to_hub("org/name")
    model.save_pretrained(tmp_path / "small", push_to_hub=True, repo_id="org/other")
    assert uploaded == [("org/name", expected), ("org/other", expected)] and names(tmp_path / "small") == expected


def test_offloading(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = load_pruned(tmp_path)
    model.save_pretrained(tmp_path / "small")
    for device_map in ("auto", "cpu", {"": "cpu"}):
        assert torch.equal(logits(load(tmp_path / "small", device_map=device_map)), logits(model))
    for folder, config in [("small", {}), ("dense", {"quantization_config": TwoFourConfig(prune=True)})]:
        for device_map in ({"model": "cpu", "lm_head": "disk"}, "auto"):
            with pytest.raises(ValueError, match="2:4 weights cannot be offloaded .* device_map puts"):
                memory = {"max_memory": {"cpu": "20KB"}} if device_map == "auto" else {}
                load(tmp_path / folder, **config, device_map=device_map, offload_folder=tmp_path / "disk", **memory)
    offloaded = accelerate.cpu_offload(load(tmp_path / "small"), "cpu", offload_buffers=True)
    with torch.no_grad():
        assert torch.equal(offloaded(TOKENS).logits, logits(model))


def test_a_manifest_that_cannot_be_read_is_named(tmp_path):
    load_pruned(tmp_path).save_pretrained(tmp_path / "small")
    path = tmp_path / "small" / "twofour-model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        manifest, tensors = (
            json.loads(file.metadata()["twofour"]),
            {name: file.get_tensor(name) for name in file.keys()},
        )

    def written(manifest, left_out=()):
        kept = {name: tensor for name, tensor in tensors.items() if name not in left_out}
        safetensors.torch.save_file(kept, path, metadata={"format": "pt", "twofour": json.dumps(manifest)})

    written({**manifest, "version": 99})
    with pytest.raises(ValueError, match="format version 99 is newer"):
        load(tmp_path / "small")
    written({"version": 1, "weights": {"a": {"shape": [1]}}})
    with pytest.raises(ValueError, match="twofour-model.safetensors: its manifest of packed weights is damaged"):
        load(tmp_path / "small")
    name = "model.layers.0.mlp.up_proj.weight"
    written(manifest, {f"{name}.meta"})
    with pytest.raises(ValueError, match=f"tensor `{name}` is packed, and the files have no `{name}.meta`"):
        load(tmp_path / "small")
    manifest["weights"][name]["shape"] = [54, 28]
    written(manifest)
    with pytest.raises(
        ValueError, match=rf"tensor `{name}`: its shape is \[54, 28\] in the file, \[54, 32\] in the model"
    ):
        load(tmp_path / "small")
