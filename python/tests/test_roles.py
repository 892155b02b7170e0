"""Which layers are chosen by default: those that the command chooses."""

import json

import pytest
import torch
from command import command, needs_command
from torch import nn

import twofour
from twofour.quantization import SemiSparseLayout
from twofour.sparsity import WandaSparsifier, apply_fake_sparsity, semi_sparse_weight, sparsify_
from twofour.sparsity.training import SemiSparseLinear, swap_linear_with_semi_sparse_linear


TYPES = [
    "llama, tied",
    "llama, reward",
    "opt",
    "gpt_neox",
    "falcon",
    "mamba",
    "rwkv",
    "mixtral",
    "qwen2_moe",
    "gpt_oss",
    "deepseek_v3",
]
TYPES += ["bert, classifier", "t5", "bart", "bert2bert", "whisper", "wav2vec2", "dinov2", "swin", "clip", "detr"]


@needs_command
def test_python_and_the_command_choose_the_same_layers_of_models_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    from model_types import build

    for name in TYPES:
        model, _ = build(name)
        model.save_pretrained(tmp_path / name)
        tensors = json.loads(command("inspect", tmp_path / name, "--json"))["tensors"]
        roles = {tensor["name"]: tensor["role"] for tensor in tensors}
        modules = {
            module
            for module, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and f"{module}.weight" in roles
        }
        chosen = set(twofour.linear_layers(model.to("meta")))
        assert modules & chosen, name
        for module in modules:
            role = roles[f"{module}.weight"]
            assert (module in chosen) == (role == "linear layer"), (name, module, role)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.router = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        return x + self.fc2(self.fc1(x).relu()) * self.router(x).amax(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(16, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 8)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BODY = ["blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2"]


def test_heads_routers_and_what_lies_outside_of_layers_are_left_out():
    with torch.device("meta"):
        assert twofour.linear_layers(Model()) == BODY
        assert twofour.linear_layers(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))) == ["0", "2"]
        assert twofour.linear_layers(nn.Linear(4, 8)) == [""]


def test_layers_that_were_replaced_are_still_chosen():
    model = Model()
    swap_linear_with_semi_sparse_linear(model, dict.fromkeys(twofour.linear_layers(model), SemiSparseLinear))
    assert twofour.linear_layers(model) == BODY
    model.blocks[0].fc1 = twofour.Linear.from_dense(model.blocks[0].fc1)
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].router)
    assert twofour.linear_layers(model) == BODY


@pytest.mark.parametrize(
    ("convert", "is_done"),
    [
        (
            lambda m: sparsify_(m, semi_sparse_weight(), prune=True),
            lambda layer: hasattr(layer.weight, "packed_weight"),
        ),
        (
            lambda m: twofour.quantize_(apply_fake_sparsity(m), SemiSparseLayout()),
            lambda layer: not isinstance(layer, nn.Linear),
        ),
        (apply_fake_sparsity, lambda layer: twofour.verify(layer.weight.detach())),
    ],
)
def test_what_converts_layers_takes_those_by_default(convert, is_done):
    model = convert(Model())
    found = [name for name, layer in model.named_modules() if hasattr(layer, "in_features") and is_done(layer)]
    assert found == BODY
    assert model(torch.randn(3, 16)).shape == (3, 8)
    with pytest.raises(
        ValueError,
        match=r"no linear layer of ModuleDict is chosen by default: 'head', for instance, is left out \(output head\)",
    ):
        convert(nn.ModuleDict({"head": nn.Linear(16, 8)}))


def test_layers_that_were_trained_sparse_are_taken_wherever_they_are():
    model = Model()
    swap_linear_with_semi_sparse_linear(model, {"head": SemiSparseLinear})
    sparsify_(model, semi_sparse_weight(), prune=True)
    assert hasattr(model.head.weight, "packed_weight") and not hasattr(model.embed.weight, "packed_weight")


def test_wanda_and_advise_take_the_same_layers():
    model, sparsifier = Model(), WandaSparsifier(semi_structured_block_size=4)
    sparsifier.prepare(model, None)
    assert [group["module_fqn"] for group in sparsifier.groups] == BODY
    sparsifier.squash_mask()
    found = [
        (c.out_features, c.in_features, c.layers) for c in twofour.advise(Model(), tokens=[1], rounds=3).comparisons
    ]
    assert found == [(16, 32, 2), (32, 16, 2)]
