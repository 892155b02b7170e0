"""EleutherAI's lm-eval on a 2:4 checkpoint: its log likelihoods beside those that transformers computes itself.

    pip install lm-eval
    python bench/python/harness.py [--folder CHECKPOINT]

Without a checkpoint a small random model is pruned and saved. The task is a local one, of two choices for each
question, so nothing is fetched. Ends with an error where the two differ.
"""

import argparse
import json
import pathlib
import tempfile

import torch
import transformers
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import twofour.transformers

QUESTIONS = [
    {"text": "The sky is", "choices": [" blue", " square"], "label": 0},
    {"text": "Two and two are", "choices": [" five", " four"], "label": 1},
    {"text": "Fish live in", "choices": [" water", " fire"], "label": 0},
]
TASK = """
task: twofour_local
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
"""


def checkpoint(folder: pathlib.Path) -> pathlib.Path:
    """A small random 2:4 model over bytes."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=256,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "dense")
    sparse = twofour.transformers.TwoFourConfig(prune=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=sparse)
    model.save_pretrained(folder / "sparse")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.save_pretrained(folder / "sparse")
    return folder / "sparse"


@torch.no_grad()
def log_likelihoods(folder: pathlib.Path) -> list[list[float]]:
    """Of each choice after its question, by transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    found = []
    for question in QUESTIONS:
        start = len(tokenizer(question["text"])["input_ids"])
        found.append([])
        for choice in question["choices"]:
            ids = torch.tensor([tokenizer(question["text"] + choice)["input_ids"]])
            scores = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])
            found[-1].append(scores[start - 1 :].sum().item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, help="a checkpoint that twofour.transformers loads")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = pathlib.Path(temporary)
        folder = arguments.folder or checkpoint(work)
        data = work / "data.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        (work / "tasks").mkdir()
        (work / "tasks" / "local.yaml").write_text(TASK.format(data=data))
        result = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "auto"},
            tasks=["twofour_local"],
            task_manager=TaskManager(include_path=str(work / "tasks"), include_defaults=False),
            device="cuda" if torch.cuda.is_available() else "cpu",
            log_samples=True,
            bootstrap_iters=0,
        )
        samples = sorted(result["samples"]["twofour_local"], key=lambda sample: sample["doc_id"])
        found = [[float(score[0][0]) for score in sample["resps"]] for sample in samples]
        expected = log_likelihoods(folder)
    print(f"lm-eval: {found}\ntransformers: {expected}\naccuracy {result['results']['twofour_local']['acc,none']:.2f}")
    worst = max(abs(a - b) for both in zip(found, expected, strict=True) for a, b in zip(*both, strict=True))
    if worst > 0.05:
        raise SystemExit(f"log likelihoods differ by {worst}")


if __name__ == "__main__":
    main()
