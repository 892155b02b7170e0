"""peft's adapters on 2:4 weights: of floats and of integers, trained, saved, loaded and merged by the command."""

import copy
import json
import pathlib

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from command import command, needs_command  # noqa: E402
from torch import nn  # noqa: E402

import twofour  # noqa: E402
from twofour import adapters  # noqa: E402
from twofour.quantization import QuantizedLinear  # noqa: E402

X = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


def base(layer):
    torch.manual_seed(4)
    return nn.Sequential(layer(nn.Linear(32, 16)), nn.Tanh(), nn.Linear(16, 8))


LAYERS = {
    "int4": lambda linear: twofour.Int4Linear.from_dense(linear, prune=True),
    "int8": lambda linear: QuantizedLinear.from_dense(linear, prune=True),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_lora_trains_beside_integers_which_stay_and_is_saved_and_loaded(kind, tmp_path):
    model = base(LAYERS[kind])
    frozen, before = copy.deepcopy(model), model(X)
    config = adapters.lora_config(target_modules=["0", "2"], r=4, lora_alpha=8)
    adapted = peft.get_peft_model(model, config)
    layer = adapted.base_model.model[0]
    assert isinstance(layer, adapters.LoraIntegerLinear)
    torch.testing.assert_close(adapted(X), before)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(6):
        loss = adapted(X).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    # The gradient of A is B' of the output's, times the input.
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    dy = torch.randn(5, 16)
    (gradient,) = torch.autograd.grad(layer(X), [a], dy)
    torch.testing.assert_close(gradient, 2.0 * (dy @ b).t() @ X, atol=1e-5, rtol=1e-4)
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(X), before)
    assert torch.equal(layer.get_base_layer().weight, frozen[0].weight)
    for merge in (adapted.merge_adapter, adapted.merge_and_unload):
        with pytest.raises(ValueError, match="of integers, which an adapter is not merged into"):
            merge()
    adapted.save_pretrained(tmp_path)
    torch.testing.assert_close(adapters.load_lora(frozen, tmp_path)(X), adapted(X))
    with pytest.raises(NotImplementedError, match="DoRA"):
        peft.get_peft_model(base(LAYERS[kind]), adapters.lora_config(target_modules=["0"], use_dora=True))


@needs_command
@pytest.mark.parametrize("root", [False, True])
def test_the_command_merges_what_peft_trained_on_a_sparse_layer(root, tmp_path):
    model = base(lambda linear: twofour.Linear.from_dense(linear, prune=True))
    dense = nn.Sequential(model[0].to_dense(), nn.Tanh(), copy.deepcopy(model[2]))
    twofour.save_file(dense, tmp_path / "base.safetensors")
    twofour.save_file(model, tmp_path / "small.safetensors")
    config = peft.LoraConfig(
        target_modules=["0", "2"], r=4, lora_alpha=6, rank_pattern={"2": 2}, use_rslora=root, init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config)
    adapted(X).sum().backward()
    adapted.save_pretrained(tmp_path / "adapter")
    mask = dense[0].weight.detach() != 0
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(dense), tmp_path / "adapter").merge_and_unload()
    for name in ("base", "small"):
        out = tmp_path / f"{name}-merged.safetensors"
        told = json.loads(command("merge", "--json", tmp_path / f"{name}.safetensors", tmp_path / "adapter", "-o", out))
        tensors = twofour.load_file(out)
        weight = tensors["0.weight"] if name == "base" else tensors["0.weight"].to_dense()
        torch.testing.assert_close(weight, merged[0].weight.detach() * mask)
        torch.testing.assert_close(tensors["2.weight"], merged[2].weight.detach())
        change = (merged[0].weight - dense[0].weight).detach()
        lost = {weight["name"]: weight["lost"] for weight in told["weights"]}
        assert lost["0.weight"] == pytest.approx((change * ~mask).norm().item() / change.norm().item(), rel=1e-4)
        assert lost["2.weight"] == 0


RECIPE = """
[model]
from = "pruned"
context = 16
[data]
text = ["text.txt"]
[training]
steps = 6
batch = 2
warm_up = 1
learning_rate = 3e-3
validation_sequences = 2
[sparsity]
method = "adapters"
rank = 2
"""


@needs_command
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_loads_the_adapter_that_the_command_trained_and_refuses_one_under_a_mask(family, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    fixtures = pathlib.Path(__file__).parents[2] / "crates/twofour-nn/tests/fixtures/checkpoints"
    pathlib.Path("text.txt").write_text("two of every four weights are zero and the others are kept. " * 30)
    pathlib.Path("recipe.toml").write_text(RECIPE)
    command("prune", fixtures / family, "-o", "pruned")
    command("train", "recipe.toml", "-o", "run", "--set", "sparsity.adapter=lora")
    load = transformers.AutoModelForCausalLM.from_pretrained
    pruned, trained = (load(folder, dtype=torch.float32).state_dict() for folder in ("pruned", "run/model"))
    merged = peft.PeftModel.from_pretrained(load("pruned", dtype=torch.float32), "run/adapter").merge_and_unload()
    adapted = [name for name, weight in pruned.items() if not torch.equal(weight, trained[name])]
    assert len(adapted) >= 8
    for name, weight in merged.state_dict().items():
        kept = pruned[name] != 0 if name in adapted else 1
        torch.testing.assert_close(weight * kept, trained[name], msg=name)
    command("train", "recipe.toml", "-o", "masked", "--set", "sparsity.adapter=lors")
    with pytest.raises((KeyError, ValueError), match="LORS"):
        peft.PeftModel.from_pretrained(load("pruned"), "masked/adapter")
