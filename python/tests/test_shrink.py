"""`twofour shrink`: transformers loads the smaller model, and it computes what zeros in the dense one do."""

import json
import pathlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from command import COMMAND, command, needs_command  # noqa: E402, F401

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "crates/twofour-nn/tests/fixtures/checkpoints"
READERS = {"down_proj": "removed_features", "o_proj": "removed_heads"}
READERS |= {end: "removed_features" for end in ("mlp.c_proj", "output.dense", "fc2", "dense_4h_to_h")}


def load(path):
    kind = transformers.AutoModel if "bert" in str(path) else transformers.AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def zero(model, blocks):
    """Zeros for the inputs that read what was removed."""
    head = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    for name, module in model.named_modules():
        removed = next((removed for end, removed in READERS.items() if name.endswith(end)), None)
        if removed is None or "attention.output" in name:
            continue
        block = blocks[next(int(part) for part in name.split(".") if part.isdigit())]
        inputs = torch.tensor(block[removed], dtype=torch.long)
        if removed == "removed_heads":
            inputs = (inputs[:, None] * head + torch.arange(head)).flatten()
        # Conv1D of GPT-2 is [in, out].
        weight = module.weight.data if isinstance(module, torch.nn.Linear) else module.weight.data.T
        weight[:, inputs] = 0


@needs_command
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", ["--features", 15, "--heads", 2]),
        ("llama", ["--kv-heads", 1]),
        ("mistral", ["--features", 9, "--heads", 1, "--kv-heads", 1]),
        ("qwen2", ["--features", 16, "--kv-heads", 1]),
        ("qwen3", ["--heads", 2, "--kv-heads", 2]),
        ("gemma2", ["--features", 8, "--kv-heads", 1]),
        ("gemma3", ["--features", 23, "--heads", 2]),
        ("gpt2", ["--features", 17]),
        ("phi3", ["--features", 9, "--kv-heads", 1]),
        ("opt", ["--features", 11]),
        ("gpt_neox", ["--features", 13]),
        ("falcon", ["--features", 14]),
        ("bert", ["--features", 10]),
    ],
)
def test_transformers_loads_the_smaller_model_and_computes_the_same(tmp_path, family, sizes):
    small = tmp_path / f"small-{family}"
    answer = json.loads(command("shrink", CHECKPOINTS / family, "-o", small, "--json", *sizes))
    tokens = torch.tensor([[3, 5, 7, 11, 13, 17, 19, 23, 29, 2]])
    dense, shrunk = load(CHECKPOINTS / family), load(small)
    zero(dense, answer["blocks"])
    with torch.no_grad():
        expected, found = (model(tokens)[0] for model in (dense, shrunk))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    # Parameters by their shapes: a mismatch would be made anew at random, with a warning.
    parameters = {name: tuple(p.shape) for name, p in shrunk.named_parameters()}
    assert parameters != {name: tuple(p.shape) for name, p in dense.named_parameters()}
    saved = tmp_path / "again"
    shrunk.save_pretrained(saved)
    with torch.no_grad():
        torch.testing.assert_close(load_again(saved, family)(tokens)[0], found)


def load_again(path, family):
    kind = transformers.AutoModel if family == "bert" else transformers.AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
