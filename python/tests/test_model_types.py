"""Models of many types of transformers are loaded pruned, saved packed, and loaded again."""

import copy
import json
import warnings

import pytest
import safetensors.torch
import torch
from model_types import TYPES, build, expect_equal, outputs

import twofour
from twofour.quantization import Int4Linear, QuantizedLinear, int4_weight_only, int8_dynamic_activation_int8_weight
from twofour.transformers import TwoFourConfig


def packed(model):
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, twofour.Linear)
    }


def loaded(kind, folder, **arguments):
    model, info = kind.from_pretrained(folder, output_loading_info=True, **arguments)
    assert not any(info.values()), {what: names for what, names in info.items() if names}
    return model


#: An empty list converts the heads and routers that the default leaves dense.
EVERY_LAYER = [
    "llama",
    "llama, tied",
    "qwen2_moe",
    "bert, classifier",
    "t5",
    "t5, untied",
    "clip",
    "siglip",
    "wav2vec2",
    "detr",
]


@pytest.mark.parametrize(
    ("name", "skipped"), [*((name, None) for name in TYPES), *((name, []) for name in EVERY_LAYER)]
)
def test_a_type_of_model(tmp_path, name, skipped):
    dense, inputs = build(name)
    kind = type(dense)
    dense.save_pretrained(tmp_path / "dense")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind.from_pretrained(tmp_path / "dense", quantization_config=TwoFourConfig(skipped, prune=True))
    layers = packed(model)
    assert layers
    # The layers compute what pruned dense ones do.
    reference = kind.from_pretrained(tmp_path / "dense")
    for module_name, layer in layers.items():
        weight = reference.get_submodule(module_name).weight
        assert torch.equal(layer.to_dense().weight, twofour.prune(weight.detach()))
        weight.data = layer.to_dense().weight.data
    expected = outputs(model, inputs)
    expect_equal(expected, outputs(reference, inputs), 1e-4)
    model.save_pretrained(tmp_path / "packed")
    again = loaded(kind, tmp_path / "packed")
    assert packed(again).keys() == layers.keys()
    expect_equal(outputs(again, inputs), expected)
    # Every layer is packed in the file, and the file is read without transformers.
    tensors = twofour.load_file(tmp_path / "packed" / "twofour-model.safetensors")
    assert sum(hasattr(tensor, "packed_weight") for tensor in tensors.values()) == len(
        {id(layer) for layer in layers.values()}
    )


@pytest.mark.parametrize(
    "name", ["llama, tied", "mamba", "mixtral", "gpt_oss", "t5", "clip", "siglip", "llava", "deformable_detr"]
)
def test_every_matrix_is_packed_in_the_file(tmp_path, name):
    """Embeddings, tables, single experts and parameters of attention become dense where no layer takes them packed."""
    dense, inputs = build(name)
    kind = type(dense)
    dense.save_pretrained(tmp_path / "dense")
    tensors = safetensors.torch.load_file(tmp_path / "dense" / "model.safetensors")
    matrices = [key for key, tensor in tensors.items() if tensor.dim() == 2]
    tensors.update({key: twofour.prune(tensors[key]) for key in matrices})
    safetensors.torch.save_file(tensors, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "packed").mkdir()
    twofour.save_file(tensors, tmp_path / "packed" / "twofour-model.safetensors", compress=matrices)
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "twofour"}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    expected = outputs(loaded(kind, tmp_path / "dense"), inputs)
    model = loaded(kind, tmp_path / "packed")
    assert packed(model)
    expect_equal(outputs(model, inputs), expected, 1e-4)
    model.save_pretrained(tmp_path / "again")
    expect_equal(outputs(loaded(kind, tmp_path / "again"), inputs), outputs(model, inputs))


#: Models that read the weights of layers, or their types: T5 that of `wo`, Mamba those of its projections, others those
#: of heads that are tied.
READERS = ["t5", "t5, untied", "wav2vec2", "gemma2", "gemma3", "llama, tied", "mamba", "bart"]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("quantize", "tolerance"),
    [(int8_dynamic_activation_int8_weight(prune=True), 0.15), (int4_weight_only(-1, prune=True), 1e-3)],
)
def test_every_layer_is_quantized(name, dtype, quantize, tolerance):
    model, inputs = build(name)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    model = model.to(dtype)
    reference = copy.deepcopy(model)
    twofour.quantize_(model, quantize, lambda module, name: type(module) is torch.nn.Linear)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, (QuantizedLinear, Int4Linear))}
    assert layers and all(layer.weight.dtype is dtype for layer in layers.values())
    for layer_name, layer in layers.items():
        reference.get_submodule(layer_name).weight = torch.nn.Parameter(layer.to_dense().to(dtype))
    found, expected = outputs(model, inputs), outputs(reference, inputs)
    rounding = 0.0 if dtype is torch.float32 else 0.15
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert (one.float() - other.float()).norm() <= (tolerance + rounding) * other.float().norm()
