"""`twofour prune --low-rank`: peft loads the part, and layers compute the pruned weight and the factors' product."""

import pathlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

from command import command, needs_command  # noqa: E402

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "crates/twofour-nn/tests/fixtures/checkpoints"
LETTERS = "acdefghiklmnoprstuvwyz"


def load(path, family):
    kind = transformers.AutoModel if family == "bert" else transformers.AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@needs_command
@pytest.mark.parametrize("form", ["eora", "slim"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2", "bert"])
def test_peft_loads_the_part_and_it_brings_the_dense_outputs_nearer(tmp_path, family, form):
    text = tmp_path / "text.txt"
    text.write_text("".join(" " if i % 7 == 3 else LETTERS[i * i // 3 % len(LETTERS)] for i in range(3000)))
    pruned = tmp_path / family
    calibration = ["--calibration", text, "--samples", 8, "--length", 24]
    # Another rank for each shape.
    command("prune", CHECKPOINTS / family, "-o", pruned, *calibration, "--low-rank", form, "--rank", "60%")
    dense, alone = load(CHECKPOINTS / family, family), load(pruned, family)
    beside = peft.PeftModel.from_pretrained(load(pruned, family), pruned / "low-rank").eval()
    tokens = torch.tensor([[3, 5, 7, 11, 13, 17, 19, 23, 29, 2]])
    with torch.no_grad():
        expected, without, found = (model(input_ids=tokens)[0] for model in (dense, alone, beside))
    assert (found - expected).norm() < (without - expected).norm()
    # Every factor found its module.
    factors = safetensors.load_file(pruned / "low-rank" / "adapter_model.safetensors")
    loaded = {name.replace(".default", ""): p for name, p in beside.named_parameters() if "lora_" in name}
    assert loaded.keys() == factors.keys() and len(factors) >= 16
    for name, factor in factors.items():
        torch.testing.assert_close(loaded[name].detach(), factor.float())
    # A model without adapters, with the products in its weights, is the same.
    merged = beside.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=tokens)[0], found, atol=1e-4, rtol=1e-4)
    weights = dict(alone.named_parameters())
    for name, weight in merged.named_parameters():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora"
        if f"{key}_A.weight" in factors:
            product = factors[f"{key}_B.weight"].float() @ factors[f"{key}_A.weight"].float()
            product = product.T if family == "gpt2" else product
            torch.testing.assert_close(weight, weights[name] + product, atol=1e-4, rtol=1e-3)
