"""Whole models of transformers, dense and 2:4: decoding with a static cache, compiled with CUDA graphs or eager, and
prefill.

    python bench/python/models.py --model 1b --forms linear sparsify --batch 1 8 -o FILE

All contenders live in one process and take turns; a figure is the median over rounds. FILE gets a list of rows
``{model, path, batch, tokens, dense_ms, ours_ms, dense_bytes, ours_bytes, form, speedup}``, to which a further run
adds. ``+optimize`` behind a form is ``twofour.transformers.optimize``; ``dense+grouped`` has its attention alone.
Bytes are the most that a contender's device memory held while it was measured, above what it held without the model.
Weights are random. ``--model tiny`` runs on a CPU.
"""

import argparse
import gc
import json
import pathlib
import random
import statistics
import time

import torch
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering, LlamaConfig, LlamaForCausalLM, StaticCache

import twofour
import twofour.transformers
from twofour.sparsity import semi_sparse_weight, sparsify_

_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SHAPES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8b": _8B,
    "8b-8-layers": {**_8B, "num_hidden_layers": 8},
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
#: Encoders, which read whole texts.
ENCODERS = {
    "bert-base": {},
    "minilm": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 12},
    "tiny-bert": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT, STEPS = 64, 20


def config_of(model: str) -> LlamaConfig | BertConfig:
    if model in ENCODERS:
        return BertConfig(**ENCODERS[model])
    return LlamaConfig(max_position_embeddings=8192, rope_theta=500000.0, dtype=torch.bfloat16, **SHAPES[model])


def made(model: str, form: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        kind = BertForQuestionAnswering if model in ENCODERS else LlamaForCausalLM
        net = kind(config_of(model)).eval()
    torch.set_default_dtype(torch.float32)
    body = net.bert if model in ENCODERS else net.model
    kind = form.partition("+")[0]
    if kind == "sparsify":
        sparsify_(body, semi_sparse_weight(), prune=True)
    elif kind in ("linear", "int4"):
        layer = twofour.Linear if kind == "linear" else twofour.Int4Linear
        for name, module in list(body.named_modules()):
            if type(module) is nn.Linear:
                body.set_submodule(name, layer.from_dense(module, prune=True))
    if form.endswith("+optimize"):
        twofour.transformers.optimize(net)
    if form.endswith("+grouped"):
        net.set_attn_implementation("twofour")
    return net


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Contender:
    """A model, and the calls that are measured."""

    def __init__(self, model: str, form: str):
        gc.collect()
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        self.config, self.net = config_of(model), made(model, form)
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            self.bytes = torch.cuda.memory_allocated() - before
        else:
            self.bytes = sum(t.nbytes for t in self.net.parameters() if type(t) is nn.Parameter)

    @torch.no_grad()
    def decoding(self, batch: int, path: str):
        """A function that decodes a token for each sequence."""
        cache = StaticCache(config=self.config, max_cache_len=512)
        call = self.net.forward
        if path == "graph":
            call = torch.compile(self.net.forward, mode="reduce-overhead", fullgraph=True)
        elif path == "compile":
            call = torch.compile(self.net.forward, fullgraph=True)
        ids = torch.randint(0, self.config.vocab_size, (batch, CONTEXT), device=DEVICE)
        places = torch.arange(CONTEXT, device=DEVICE)
        self.net(input_ids=ids, past_key_values=cache, cache_position=places, use_cache=True)
        token, place = ids[:, :1].clone(), torch.tensor([CONTEXT], device=DEVICE)

        def steps():
            place.fill_(CONTEXT)
            for _ in range(STEPS):
                out = call(input_ids=token, past_key_values=cache, cache_position=place, use_cache=True)
                token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
                place.add_(1)

        return steps, STEPS

    @torch.no_grad()
    def prefill(self, batch: int, tokens: int, path: str):
        """A function that reads the prompts of a batch."""
        mode = "reduce-overhead" if path == "graph" else None
        call = self.net.forward if path == "eager" else torch.compile(self.net.forward, mode=mode, fullgraph=True)
        ids = torch.randint(0, self.config.vocab_size, (batch, tokens), device=DEVICE)
        if isinstance(self.config, BertConfig):
            return (lambda: call(input_ids=ids)), 1
        return (lambda: call(input_ids=ids, use_cache=False, logits_to_keep=1)), 1


@torch.no_grad()
def compared(functions: dict, rounds: int) -> tuple[dict, dict]:
    """Median milliseconds and the most bytes beyond the start, by contender."""
    times, peaks = {name: [] for name in functions}, {}
    for name, (function, _) in functions.items():
        for _ in range(2):
            function()
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            function()
            synchronize()
            peaks[name] = torch.cuda.max_memory_allocated() - start
    for _ in range(rounds):
        for name in random.sample(list(functions), len(functions)):
            function, count = functions[name]
            synchronize()
            begun = time.perf_counter()
            function()
            synchronize()
            times[name].append((time.perf_counter() - begun) / count * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}, peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*SHAPES, *ENCODERS], default="tiny")
    parser.add_argument("--forms", nargs="+", default=["linear", "sparsify", "int4"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1], help="batches to decode")
    parser.add_argument("--prefill", nargs="*", default=[], help="batches and tokens, as in 4x1024")
    parser.add_argument("--path", choices=("graph", "compile", "eager"), default="graph")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=pathlib.Path, help="adds rows to this file")
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    # Contenders are instances of the same classes, whose compiled code counts as one function's.
    torch._dynamo.config.recompile_limit = 64
    path = "compile" if DEVICE == "cpu" and arguments.path == "graph" else arguments.path
    contenders = {form: Contender(arguments.model, form) for form in ["dense", *arguments.forms]}
    work = [(batch, 1) for batch in arguments.batch]
    work += [tuple(map(int, each.split("x"))) for each in arguments.prefill]
    rows = json.loads(arguments.output.read_text()) if arguments.output and arguments.output.exists() else []
    for batch, tokens in work:
        torch._dynamo.reset()
        functions = {}
        for form, contender in contenders.items():
            try:
                functions[form] = (
                    contender.decoding(batch, path) if tokens == 1 else contender.prefill(batch, tokens, path)
                )
                with torch.no_grad():
                    functions[form][0]()
            except Exception as error:  # the other contenders' rows are worth having
                functions.pop(form, None)
                print(f"FAILED {arguments.model} {form} {batch}x{tokens}: {error!r}"[:600], flush=True)
        times, peaks = compared(functions, arguments.rounds)
        for form in times:
            if form == "dense":
                continue
            row = {
                "model": arguments.model,
                "path": path,
                "batch": batch,
                "tokens": tokens,
                "dense_ms": times["dense"],
                "ours_ms": times[form],
                "dense_bytes": contenders["dense"].bytes,
                "ours_bytes": contenders[form].bytes,
                "dense_peak_bytes": peaks.get("dense"),
                "ours_peak_bytes": peaks.get(form),
                "form": form,
                "speedup": times["dense"] / times[form],
            }
            rows.append(row)
            print(
                f"{arguments.model} {path} {batch}x{tokens} {form}: dense {row['dense_ms']:.3f} ms, "
                f"ours {row['ours_ms']:.3f} ms, {row['speedup']:.3f}x, bytes {row['ours_bytes'] / 1e9:.2f} of "
                f"{row['dense_bytes'] / 1e9:.2f} GB, after {time.perf_counter() - started:.0f} s",
                flush=True,
            )
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
