"""The quantization method of vLLM, against stand-ins with the signatures of vLLM 0.33. The engine itself is not run."""

import importlib
import pathlib
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import close
from torch import nn

import twofour

DENSE = {"quant_method": "none"}
CANONICAL = {"quant_method": "twofour", "modules_to_not_convert": ["lm_head"], "prune": True}
BITMASK = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
    "sparsity_config": {
        "format": "sparse-24-bitmask",
        "global_sparsity": 0.5,
        "sparsity_structure": "2:4",
        "targets": ["Linear"],
        "ignore": [],
    },
}


def stand_ins():
    """Modules with what the plugin imports of vLLM, and a linear layer that loads as vLLM's do."""
    registry = {}

    class QuantizationConfig:
        def __init__(self):
            self.packed_modules_mapping = {}

    class LinearMethodBase:
        pass

    class UnquantizedLinearMethod(LinearMethodBase):
        pass

    class LinearBase(nn.Module):
        """Joins the rows of several weights, of which a rank has a part of the rows or of the columns."""

        def __init__(self, in_features, sizes, config, prefix, dtype=torch.float32, rank=0, ranks=1, split="rows"):
            super().__init__()
            self.rank, self.split = rank, split
            self.sizes = [size // ranks for size in sizes] if split == "rows" else list(sizes)
            mine = in_features if split == "rows" else in_features // ranks
            self.quant_method = config.get_quant_method(self, prefix=prefix)
            self.quant_method.create_weights(
                self, mine, self.sizes, in_features, sum(sizes), dtype, weight_loader=self.weight_loader
            )

        def weight_loader(self, parameter, loaded, shard=0):
            data, dim = (
                parameter.data,
                getattr(parameter, "input_dim" if self.split == "columns" else "output_dim", None),
            )
            data = data.narrow(parameter.output_dim, sum(self.sizes[:shard]), self.sizes[shard])
            if dim is not None:
                loaded = loaded.narrow(dim, self.rank * data.shape[dim], data.shape[dim])
            assert data.shape == loaded.shape
            data.copy_(loaded)

        def load(self, shard, tensors):
            parameters = dict(self.named_parameters())
            for name, tensor in tensors.items():
                parameter = parameters[name]
                parameter.weight_loader(parameter, tensor, shard)

        def forward(self, x, bias=None):
            return self.quant_method.apply(self, x, bias)

    def register_quantization_config(name):
        def wrap(cls):
            assert issubclass(cls, QuantizationConfig)
            if name in registry:
                raise ValueError(f"{name} is registered already")
            registry[name] = cls
            return cls

        return wrap

    contents = {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        "vllm.model_executor.layers.quantization": {"register_quantization_config": register_quantization_config},
        "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    }
    modules = {}
    for name, members in contents.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(members)
    return (
        modules,
        registry,
        types.SimpleNamespace(LinearBase=LinearBase, UnquantizedLinearMethod=UnquantizedLinearMethod),
    )


@pytest.fixture
def vllm(monkeypatch):
    """The plugin, imported beside the stand-ins."""
    modules, registry, classes = stand_ins()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("twofour.vllm", "twofour.integrations.vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    classes.plugin = importlib.import_module("twofour.vllm")
    classes.registry = registry
    yield classes
    for name in ("twofour.vllm", "twofour.integrations.vllm"):
        sys.modules.pop(name, None)


def weight(rows, cols, dtype=torch.float32):
    return twofour.prune(torch.randn(rows, cols).to(dtype))


def stored(dense, storage):
    """The tensors that a checkpoint has for a weight."""
    if storage == "dense":
        return {"weight": dense}
    if storage == "canonical":
        parts = twofour.compress(dense)
        return {"weight.values": parts.values, "weight.meta": parts.meta.view(torch.uint32)}
    # The format's writer keeps exactly two of four, in ascending column.
    order = dense.abs().float().view(dense.shape[0], -1, 4).argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros(order.shape, dtype=torch.bool).scatter_(-1, order[..., :2], True).view(dense.shape)
    bits = np.packbits(kept.numpy(), axis=1, bitorder="little")
    shape = torch.tensor(dense.shape).view(2, 1)
    return {"compressed": dense[kept].view(dense.shape[0], -1), "bitmask": torch.from_numpy(bits), "shape": shape}


def config(vllm, storage):
    if storage == "dense":
        return vllm.plugin.TwoFourConfig()
    return vllm.plugin.TwoFourConfig.from_config(CANONICAL if storage == "canonical" else BITMASK)


STORAGES = ["dense", "canonical", "sparse-24-bitmask"]


def test_the_entry_point_names_the_plugin():
    tomllib = pytest.importorskip("tomllib")
    file = pathlib.Path(__file__).parents[2] / "pyproject.toml"
    if not file.exists():
        pytest.skip("the tests are not in the project's tree")
    project = tomllib.loads(file.read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"twofour": "twofour.vllm:register"}


def test_registering_twice(vllm):
    vllm.plugin.register()
    vllm.plugin.register()
    assert vllm.registry == {"twofour": vllm.plugin.TwoFourConfig}
    config = vllm.plugin.TwoFourConfig()
    assert config.get_name() == "twofour" and config.get_min_capability() == 80 and config.get_config_filenames() == []
    assert torch.bfloat16 in config.get_supported_act_dtypes()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_joined_weights(vllm, device, storage, dtype):
    layer = vllm.LinearBase(64, [48, 16, 16], config(vllm, storage), "model.layers.0.self_attn.qkv_proj", dtype)
    dense = [weight(size, 64, dtype) for size in (48, 16, 16)]
    for shard, part in enumerate(dense):
        layer.load(shard, stored(part, storage))
    layer.to(device)
    layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.process_weights_after_loading(layer)
    # What was read is gone.
    assert [name for name, _ in layer.named_parameters()] == ["weight_packed"] and not list(layer.children())
    x, bias = torch.randn(5, 64, device=device).to(dtype), torch.randn(80, device=device).to(dtype)
    whole = torch.cat(dense).to(device)
    close(layer(x), F.linear(x.double(), whole.double()))
    close(layer(x, bias), F.linear(x.double(), whole.double(), bias.double()))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("split", ["rows", "columns"])
def test_two_ranks(vllm, storage, split):
    dense, x = weight(32, 64), torch.randn(3, 64)
    results = []
    for rank in range(2):
        layer = vllm.LinearBase(64, [32], config(vllm, storage), "down_proj", rank=rank, ranks=2, split=split)
        layer.load(0, stored(dense, storage))
        layer.quant_method.process_weights_after_loading(layer)
        results.append(layer(x if split == "rows" else x[:, 32 * rank :][:, :32]))
    y = torch.cat(results, 1) if split == "rows" else sum(results)
    close(y, x.double() @ dense.double().t())


def test_what_cannot_be_split_is_named(vllm):
    for storage, features, step in [("canonical", 80, 32), ("sparse-24-bitmask", 40, 8), ("dense", 12, 4)]:
        with pytest.raises(
            ValueError, match=f"o_proj: {features // 2} input features a rank, which must be a multiple of {step}"
        ):
            vllm.LinearBase(features, [32], config(vllm, storage), "o_proj", ranks=2, split="columns")
    with pytest.raises(ValueError, match="o_proj: no kernel multiplies torch.float64"):
        vllm.LinearBase(64, [32], config(vllm, "dense"), "o_proj", torch.float64)


def test_dense_weights_are_verified_or_pruned(vllm):
    dense = torch.randn(16, 32)
    layer = vllm.LinearBase(32, [16], vllm.plugin.TwoFourConfig(), "up_proj")
    layer.load(0, {"weight": dense})
    with pytest.raises(ValueError, match="up_proj.weight: row 0, group 0: 4 non-zeros"):
        layer.quant_method.process_weights_after_loading(layer)
    layer = vllm.LinearBase(32, [16], vllm.plugin.TwoFourConfig(prune=True), "up_proj")
    layer.load(0, {"weight": dense})
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(2, 32)
    close(layer(x), x.double() @ twofour.prune(dense).double().t())


def test_damaged_weights_are_named(vllm):
    for storage, part, message in [
        ("canonical", "weight.meta", "up_proj.weight: row 0, group 0: metadata code"),
        ("sparse-24-bitmask", "bitmask", "up_proj.weight: kept values of the bitmask: expected 0"),
    ]:
        layer = vllm.LinearBase(32, [16], config(vllm, storage), "up_proj")
        tensors = stored(weight(16, 32), storage)
        tensors[part] = torch.zeros(tensors[part].shape, dtype=tensors[part].dtype)
        layer.load(0, tensors)
        with pytest.raises(ValueError, match=message):
            layer.quant_method.process_weights_after_loading(layer)


def test_which_checkpoints_are_claimed(vllm):
    claims = vllm.plugin.TwoFourConfig.override_quantization_method
    assert claims(BITMASK, None) == claims(BITMASK, "compressed-tensors", None) == "twofour"
    assert claims(BITMASK, "fp8", None) is None
    for other in (
        {},
        None,
        DENSE,
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "dense"}},
        {"quant_method": "awq"},
    ):
        assert claims(other, None, hf_config=None) is None
    assert config(vllm, "sparse-24-bitmask").ignored == ["lm_head"]
    with pytest.raises(ValueError, match="quantized besides"):
        vllm.plugin.TwoFourConfig.from_config(
            {**BITMASK, "format": "float-quantized", "config_groups": {"group_0": {}}}
        )
    with pytest.raises(ValueError, match="neither"):
        vllm.plugin.TwoFourConfig.from_config({"quant_method": "awq"})


def test_which_layers_are_sparse(vllm):
    made = vllm.plugin.TwoFourConfig(
        "dense", ["lm_head", "model.layers.1", "re:.*vision.*", "k_proj", "q_proj", "v_proj", "gate_proj"]
    )
    made.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    layer = vllm.LinearBase(32, [16], vllm.plugin.TwoFourConfig(), "any")

    def is_sparse(prefix):
        return not isinstance(made.get_quant_method(layer, prefix), vllm.UnquantizedLinearMethod)

    assert is_sparse("model.layers.0.mlp.down_proj") and is_sparse("model.layers.11.mlp.down_proj")
    for prefix in ("lm_head", "model.layers.1.mlp.down_proj", "model.vision.fc", "model.layers.0.self_attn.qkv_proj"):
        assert not is_sparse(prefix)
    with pytest.raises(ValueError, match="gate_up_proj joins .*only model.layers.0.mlp.gate_proj are dense"):
        is_sparse("model.layers.0.mlp.gate_up_proj")
    assert made.get_quant_method(nn.Embedding(2, 2), "embed") is None


INTEGERS = {
    "int8": twofour.quantization.int8_dynamic_activation_int8_weight(),
    "int4, 128": twofour.quantization.int4_weight_only(),
    "int4, rows": twofour.quantization.int4_weight_only(-1),
}
NAMES = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]


def folder_of(tmp_path, quantized, features=256):
    """A folder with three packed weights and a dense one, and the layers."""
    from twofour.quantization import quantize_

    layers = {}
    for name, size in zip(NAMES, (48, 16, 16), strict=True):
        linear = nn.Linear(features, size, bias=False)
        linear.weight.data = twofour.prune(linear.weight.data)
        layers[f"{name}.weight"] = linear
    model = nn.ModuleList(layers.values())
    if quantized is not None:
        quantize_(model, quantized)
    else:
        model = nn.ModuleList(map(twofour.Linear.from_dense, model))
    entries = dict(zip(layers, model, strict=True)) | {"model.layers.0.mlp.up_proj.weight": torch.randn(8, features)}
    twofour.save_file(entries, tmp_path / "twofour-model.safetensors")
    return list(model)


@pytest.mark.parametrize("kind", [None, *INTEGERS])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_files_say_what_is_packed_and_how(vllm, tmp_path, kind, ranks):
    import safetensors.torch

    layers = folder_of(tmp_path, kind and INTEGERS[kind])
    made = vllm.plugin.TwoFourConfig.from_config({"quant_method": "twofour", "modules_to_not_convert": ["q_proj"]})
    made.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    made.maybe_update_config(str(tmp_path))
    # A list that does not fit the files does no harm.
    assert made.entries.keys() == {f"{name}.weight" for name in NAMES}
    stored = safetensors.torch.load_file(tmp_path / "twofour-model.safetensors")
    x, bias = torch.randn(5, 256), torch.randn(80)
    y = []
    for rank in range(ranks):
        fused = vllm.LinearBase(256, [48, 16, 16], made, "model.layers.0.self_attn.qkv_proj", rank=rank, ranks=ranks)
        for shard, name in enumerate(NAMES):
            fused.load(
                shard,
                {
                    part.removeprefix(f"{name}."): tensor
                    for part, tensor in stored.items()
                    if part.startswith(f"{name}.")
                },
            )
        fused.quant_method.process_weights_after_loading(fused)
        assert not list(fused.children())
        y.append(fused(x).split([48 // ranks, 16 // ranks, 16 // ranks], 1))
        if ranks == 1:
            close(fused(x, bias), (fused(x) + bias).double())
    found = torch.cat([torch.cat(parts, 1) for parts in zip(*y, strict=True)], 1)
    close(found, torch.cat([layer(x) for layer in layers], 1).double())


@pytest.mark.parametrize("kind", [None, *INTEGERS])
def test_columns_of_integers_on_two_ranks(vllm, tmp_path, kind):
    import safetensors.torch

    layer = folder_of(tmp_path, kind and INTEGERS[kind])[0]
    made = vllm.plugin.TwoFourConfig.from_config({"quant_method": "twofour"})
    made.maybe_update_config(str(tmp_path))
    stored = safetensors.torch.load_file(tmp_path / "twofour-model.safetensors")
    x, y = torch.randn(3, 256), 0
    for rank in range(2):
        part = vllm.LinearBase(256, [48], made, NAMES[0], rank=rank, ranks=2, split="columns")
        part.load(
            0,
            {
                name.removeprefix(f"{NAMES[0]}."): tensor
                for name, tensor in stored.items()
                if name.startswith(f"{NAMES[0]}.")
            },
        )
        part.quant_method.process_weights_after_loading(part)
        y = y + part(x[:, 128 * rank :][:, :128])
    # Each rank of an int8 layer quantizes its own inputs.
    difference = (y - layer(x)).abs().max() / layer(x).abs().max()
    assert difference <= (0.02 if kind == "int8" else 1e-5)


def test_groups_that_no_kernel_has_are_dequantized(vllm, tmp_path):
    import safetensors.torch

    dense = twofour.prune(torch.randint(-7, 8, (16, 128), dtype=torch.int8))
    integers = twofour.compress(dense)
    scales = torch.rand(16, 2).half()
    twofour.save_file(
        {"up_proj.weight": twofour.Compressed(integers.values, integers.meta, (16, 128), "int8", scales, 64)},
        tmp_path / "twofour-model.safetensors",
    )
    made = vllm.plugin.TwoFourConfig.from_config({"quant_method": "twofour"})
    made.maybe_update_config(str(tmp_path))
    layer = vllm.LinearBase(128, [16], made, "up_proj")
    stored = safetensors.torch.load_file(tmp_path / "twofour-model.safetensors")
    layer.load(0, {name.removeprefix("up_proj."): tensor for name, tensor in stored.items()})
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(2, 128)
    close(layer(x), x.double() @ (dense.double() * scales.double().repeat_interleave(64, 1)).t())


def test_names_are_mapped_and_joined_weights_are_alike(vllm, tmp_path):
    folder_of(tmp_path, INTEGERS["int8"])
    made = vllm.plugin.TwoFourConfig.from_config(
        {"quant_method": "twofour", "modules_to_not_convert": ["model.layers.0.mlp.up_proj"]}
    )
    made.maybe_update_config(str(tmp_path))

    def renamed(name):
        return name.replace("model.layers", "language_model.layers")

    mapper = types.SimpleNamespace(
        apply_list=lambda names: list(map(renamed, names)),
        apply_dict=lambda entries: {renamed(n): e for n, e in entries.items()},
    )
    made.apply_vllm_mapper(mapper)
    layer = vllm.LinearBase(32, [16], vllm.plugin.TwoFourConfig(), "any")
    method = made.get_quant_method(layer, renamed(NAMES[0]))
    assert method.kind.dtype == "int8" and isinstance(
        made.get_quant_method(layer, "language_model.layers.0.mlp.up_proj"), vllm.UnquantizedLinearMethod
    )
    entry = made.entries[f"{renamed(NAMES[0])}.weight"]
    made.entries[f"{renamed(NAMES[0])}.weight"] = type(entry)(entry.shape, "int4", 128)
    made.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with pytest.raises(ValueError, match="qkv_proj joins .*packed in different ways"):
        made.get_quant_method(layer, "language_model.layers.0.self_attn.qkv_proj")
    # A repository that is not on this machine: weights are taken to be floats.
    made = vllm.plugin.TwoFourConfig.from_config({"quant_method": "twofour"})
    made.maybe_update_config("org/absent")
    assert made.entries == {} and made.get_quant_method(layer, NAMES[0]).kind.dtype == "float"
