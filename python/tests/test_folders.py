"""Folders of models, dense and packed, from the command and from Python, against every reader."""

import json
import math
import pathlib
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from command import command, needs_command
from model_types import T

import twofour
import twofour.transformers
from twofour.quantization import int4_weight_only, int8_dynamic_activation_int8_weight, quantize_
from twofour.transformers import TwoFourConfig

SENTENCES = (
    "The quick brown fox jumps over the lazy dog. Two of every four weights are kept, and kernels skip the zeros. " * 4
)
IDS = torch.arange(40).view(2, 20) * 5 % 300

#: Of each folder the largest relative error of logits: those of int8 layers, which quantize their inputs, are not
#: those of dense weights.
FOLDERS = {
    "dense, Python": 0.0,
    "dense, command": 1e-4,
    "pruned, Python": 1e-4,
    "pruned, command": 1e-4,
    "compressed, Python": 1e-4,
    "compressed, command": 1e-4,
    "compressed and sharded, Python": 1e-4,
    "compressed and sharded, command": 1e-4,
    "int8, Python": 0.1,
    "int8, command": 0.1,
    "int8 by groups, command": 1e-4,
    "int8 head, command": 0.1,
    "int4, Python": 1e-4,
    "int4, command": 1e-4,
    "int4 by 64, command": 1e-4,
}
PACKED = [name for name in FOLDERS if not name.startswith(("dense", "pruned"))]


def is_decoder_linear(module, name):
    return isinstance(module, torch.nn.Linear) and name != "lm_head"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """All folders, by name."""
    root = tmp_path_factory.mktemp("folders")
    places = {name: root / name.replace(", ", "-").replace(" ", "-") for name in FOLDERS}
    torch.manual_seed(0)
    config = T.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=136,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = T.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(places["dense, Python"])
    _write_tokenizer(places["dense, Python"])

    def python(name, change, **arguments):
        changed = T.LlamaForCausalLM.from_pretrained(places["dense, Python"], **arguments)
        change(changed)
        shards = {"max_shard_size": "100KB"} if "sharded" in name else {}
        changed.save_pretrained(places[name], **shards)
        shutil.copy(places["dense, Python"] / "tokenizer.json", places[name])

    def prune_(model):
        for name, module in model.named_modules():
            if is_decoder_linear(module, name):
                module.weight.data = twofour.prune(module.weight.data)

    python("pruned, Python", prune_)
    for name in ("compressed, Python", "compressed and sharded, Python"):
        python(name, lambda model: None, quantization_config=TwoFourConfig(prune=True))
    python(
        "int8, Python",
        lambda model: quantize_(model, int8_dynamic_activation_int8_weight(prune=True), is_decoder_linear),
    )
    python("int4, Python", lambda model: quantize_(model, int4_weight_only(prune=True), is_decoder_linear))
    shards = root / "shards"
    T.LlamaForCausalLM.from_pretrained(places["pruned, Python"]).save_pretrained(shards, max_shard_size="100KB")
    shutil.copy(places["dense, Python"] / "tokenizer.json", shards)

    pruned = places["pruned, command"]
    command("prune", places["dense, Python"], "-o", pruned)
    command("compress", pruned, "-o", places["compressed, command"])
    command("compress", shards, "-o", places["compressed and sharded, command"])
    for name, flags in {
        "int8, command": ["int8"],
        "int8 by groups, command": ["int8", "--group", 128],
        "int8 head, command": ["int8", "--head", "int8"],
        "int4, command": ["int4"],
        "int4 by 64, command": ["int4", "--group", 64],
    }.items():
        command("quantize", pruned, "-o", places[name], "--dtype", *flags)
    command("decompress", places["compressed, Python"], "-o", places["dense, command"])
    return places


def _write_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([SENTENCES], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def load(folder):
    model, info = T.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(info.values()), info
    return model


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def dense_model(folder):
    """The model of a folder with the floats that its files stand for."""
    tensors = {}
    for name, tensor in twofour.load_file(folder).items():
        if isinstance(tensor, twofour.Compressed):
            integers = tensor.to_dense().float()
            tensor = (
                integers * tensor.scales[:, None] if tensor.dtype == "int8" and tensor.group_size is None else integers
            )
        tensors[name] = tensor.to_dense() if hasattr(tensor, "packed_weight") else tensor
    for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]:
        tensors[name] = tensors[name].float() * tensors.pop(f"{name}.scales")[:, None]
    config = T.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = T.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(tensors)
    return model


def difference(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@needs_command
def test_what_the_folders_say(folders):
    for name, folder in folders.items():
        config = json.loads((folder / "config.json").read_text())
        weights = sorted(path.name for path in folder.iterdir() if ".safetensors" in path.name)
        assert len(weights) > 1 if "sharded" in name else len(weights) == 1
        if name in PACKED:
            assert (
                config["quantization_config"]["quant_method"] == "twofour"
                and "lm_head" in config["quantization_config"]["modules_to_not_convert"]
            )
            assert all(weight.startswith("twofour-model") for weight in weights)
            assert "import twofour.transformers" in (folder / "README-twofour.md").read_text()
        else:
            assert "quantization_config" not in config and weights == ["model.safetensors"]
            assert not (folder / "README-twofour.md").exists()


@needs_command
@pytest.mark.parametrize("name", FOLDERS)
def test_python_and_the_command_read_it(folders, tmp_path, name):
    folder, tolerance = folders[name], FOLDERS[name]
    model = load(folder)
    # The floats that the files stand for.
    expected = (
        logits(dense_model(folder))
        if name in PACKED
        else logits(load(folders["dense, Python" if name == "dense, Python" else "pruned, Python"]))
    )
    assert difference(logits(model), expected) <= tolerance
    if name in PACKED:
        kinds = {"compressed": twofour.Linear, "int8 by groups": twofour.Linear, "int4 by 64": twofour.Linear}
        kinds |= {
            "int8": twofour.quantization.QuantizedLinear,
            "int8 head": twofour.quantization.QuantizedLinear,
            "int4": twofour.Int4Linear,
        }
        kind = kinds[name.partition(",")[0].removesuffix(" and sharded")]
        assert sum(type(module) is kind for module in model.modules()) == 14
    # The command computes what transformers does.
    text = tmp_path / "text"
    text.write_text(SENTENCES)
    measured = json.loads(
        command("eval", folder, "--text", text, "--window", 64, "--stride", 64, "--dtype", "f32", "--json")
    )
    assert abs(math.log(measured["perplexity"]) - _mean_loss(model, folder)) <= max(0.1 * (tolerance > 0.01), 2e-3)
    prompt = ["--prompt", "The quick", "--length", 4, "--temperature", 0, "--dtype", "f32", "--json"]
    assert len(json.loads(command("generate", folder, *prompt))["token_ids"]) == 4
    command("inspect", folder)
    # An ordinary checkpoint of floats again, that transformers reads, and what Python writes of this model the command
    # reads.
    plain = folder
    if not name.startswith(("dense", "pruned")):
        plain = tmp_path / "plain"
        command("decompress", folder, "-o", plain)
    tensors = safetensors.torch.load_file(plain / "model.safetensors") if "sharded" not in name else None
    assert tensors is None or {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert not list(plain.glob("*twofour*"))
    assert difference(logits(load(plain)), expected) <= 1e-4
    model.save_pretrained(tmp_path / "again")
    shutil.copy(folder / "tokenizer.json", tmp_path / "again")
    again = json.loads(
        command("eval", tmp_path / "again", "--text", text, "--window", 64, "--stride", 64, "--dtype", "f32", "--json")
    )
    assert again["perplexity"] == pytest.approx(measured["perplexity"], rel=1e-3)
    if not name.startswith("dense, Python"):
        command("check", folder)


def _mean_loss(model, folder):
    """The mean of the losses of all tokens but the first of each window of 64."""
    from tokenizers import Tokenizer

    ids = torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SENTENCES).ids)
    losses = []
    for window in ids.split(64):
        predicted = logits(model, window[None])[0].log_softmax(-1)
        losses += [-predicted[place, token].item() for place, token in enumerate(window[1:])]
    return sum(losses) / len(losses)


@needs_command
def test_without_the_package_packed_folders_fail_to_load(folders):
    program = """
import sys, transformers
for folder in sys.argv[1:]:
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        print("loads")
    except OSError as error:
        print("fails" if "model.safetensors" in str(error) else error)
assert "twofour" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, folders.values())],
        capture_output=True,
        text=True,
        cwd=folders["dense, Python"],
    )
    assert done.returncode == 0, done.stderr
    assert dict(zip(folders, done.stdout.split(), strict=True)) == {
        name: "fails" if name in PACKED else "loads" for name in folders
    }


@needs_command
def test_packed_and_ordinary_weights_in_one_folder_are_an_error(folders, tmp_path):
    both = tmp_path / "both"
    shutil.copytree(folders["compressed, command"], both)
    shutil.copy(folders["pruned, command"] / "model.safetensors", both)
    for read in (load, twofour.load_file):
        with pytest.raises(ValueError, match="twofour-model.safetensors.*[ `]model.safetensors"):
            read(both)
    # Their old name is taken.
    (both / "model.safetensors").unlink()
    expected = logits(load(both))
    (both / "twofour-model.safetensors").rename(both / "model.safetensors")
    assert torch.equal(logits(load(both)), expected)
    assert twofour.load_file(both).keys() == twofour.load_file(folders["compressed, command"]).keys()
    assert pathlib.Path(both / "model.safetensors").exists()


@needs_command
def test_experts_of_one_tensor_are_read_from_a_packed_folder(tmp_path):
    fixture = pathlib.Path(__file__).parents[2] / "crates/twofour-nn/tests/fixtures/checkpoints/gpt_oss"
    command("prune", fixture, "-o", tmp_path / "pruned")
    command("compress", tmp_path / "pruned", "-o", tmp_path / "small")
    pruned, small = (T.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("pruned", "small"))
    of_experts = [name for name, _ in pruned.named_parameters() if ".experts." in name]
    assert len(of_experts) == 2 * 4
    for name in of_experts:
        assert torch.equal(pruned.get_parameter(name), small.get_parameter(name)), name
    torch.testing.assert_close(small(IDS % 80).logits, pruned(IDS % 80).logits, atol=1e-4, rtol=1e-4)
