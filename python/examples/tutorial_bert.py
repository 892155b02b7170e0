#!/usr/bin/env python3
"""PyTorch's tutorial on semi-structured sparsity: BERT for question answering, pruned by torch.ao.pruning, compressed,
and timed.

    python python/examples/tutorial_bert.py                      # a small BERT, seconds on a CPU
    python python/examples/tutorial_bert.py --full -o bert.json  # BERT-base, batches of 4, 16, 64 and 256
    python python/examples/tutorial_bert.py --full --weights FOLDER

Weights are random unless --weights names a folder of transformers; random numbers take as long to multiply as trained
ones. Only the import of `to_sparse_semi_structured` differs from the tutorial. Dense and 2:4 take turns; latencies are
medians over rounds of one forward pass.
"""

import argparse
import copy
import json
import platform
import random
import statistics
import time

import torch
from torch.ao.pruning import WeightNormSparsifier
from transformers import BertConfig, BertForQuestionAnswering

import twofour
from twofour.sparse import to_sparse_semi_structured  # was: from torch.sparse import …

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--full", action="store_true", help="BERT-base, sequences of 384 tokens; the tutorial's size")
    p.add_argument("--weights", help="a folder of a BERT for question answering")
    p.add_argument("--batches", type=int, nargs="+", help="batch sizes; 4 16 64 256 with --full, 1 4 otherwise")
    p.add_argument("--tokens", type=int, help="tokens of a sequence; 384 with --full, 32 otherwise")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="float16 on a GPU, float32 on a CPU by default"
    )
    p.add_argument("--compile", action="store_true", help="measure the compiled models, too")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("-o", "--output", help="write JSON to this file")
    chosen = p.parse_args()
    chosen.batches = chosen.batches or ([4, 16, 64, 256] if chosen.full else [1, 4])
    chosen.tokens = chosen.tokens or (384 if chosen.full else 32)
    chosen.dtype = getattr(torch, chosen.dtype or ("float16" if chosen.device.startswith("cuda") else "float32"))
    return chosen


def prune(model: torch.nn.Module) -> None:
    """Makes the weights 2:4 by magnitude."""
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(model, [{"tensor_fqn": f"{name}.weight"} for name in twofour.linear_layers(model)])
    sparsifier.step()
    sparsifier.squash_mask()


def compressed(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with compressed weights."""
    model = copy.deepcopy(model)
    for name in twofour.linear_layers(model):
        module = model.get_submodule(name)
        module.weight = torch.nn.Parameter(to_sparse_semi_structured(module.weight))
    return model


def seconds(model: torch.nn.Module, inputs: dict, device: str) -> float:
    """The time of one forward pass."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    model(**inputs)
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(models: dict, inputs: dict, device: str, rounds: int) -> dict[str, float]:
    """Median milliseconds by name; models take turns in random order."""
    times = {name: [] for name in models}
    for model in models.values():
        for _ in range(2):
            model(**inputs)
    for _ in range(rounds):
        for name in random.sample(list(models), len(models)):
            times[name].append(seconds(models[name], inputs, device) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    chosen = options()
    torch.manual_seed(0)
    if chosen.weights:
        dense = BertForQuestionAnswering.from_pretrained(chosen.weights)
    else:
        dense = BertForQuestionAnswering(BertConfig(**({} if chosen.full else SMALL)))
    dense = dense.to(chosen.device, chosen.dtype).eval()
    prune(dense)
    with torch.inference_mode():
        models = {"dense": dense, "2:4": compressed(dense)}
        results = []
        ways = {"eager": models}
        if chosen.compile:
            ways["compiled"] = {name: torch.compile(model) for name, model in models.items()}
        for batch in chosen.batches:
            ids = torch.randint(dense.config.vocab_size, (batch, chosen.tokens), device=chosen.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            expected, found = (model(**inputs).start_logits.float() for model in models.values())
            difference = ((found - expected).norm() / expected.norm()).item()
            assert difference < 0.05, f"the compressed model differs by {difference}"
            for way, contenders in ways.items():
                ms = measure(contenders, inputs, chosen.device, chosen.rounds)
                speedup = ms["dense"] / ms["2:4"]
                line = f"batch {batch:4} x {chosen.tokens} tokens, {way:8}  dense {ms['dense']:9.2f} ms  2:4 {ms['2:4']:9.2f} ms"
                print(f"{line}  {speedup:5.2f}x", flush=True)
                results.append(
                    {"batch": batch, "tokens": chosen.tokens, "way": way, "ms": ms, "relative_difference": difference}
                )
    if chosen.output:
        machine = (
            torch.cuda.get_device_name()
            if chosen.device.startswith("cuda")
            else platform.processor() or platform.machine()
        )
        record = {
            "machine": machine,
            "threads": torch.get_num_threads(),
            "dtype": str(chosen.dtype),
            "full": chosen.full,
            "rounds": chosen.rounds,
        }
        record |= {"torch": torch.__version__, "twofour": twofour.__version__, "results": results}
        with open(chosen.output, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
