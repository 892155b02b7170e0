"""Decoding with int4 weights: 2:4 ones of twofour beside what one would use instead, dense ones of torch.

    python bench/python/int4.py [-o FILE] [--rounds N]

The four kinds of linear layers of Llama 3 8B, in groups of 128 with bfloat16 activations. Contenders, interleaved in
shuffled order: ``F.linear`` in bfloat16, ``torch._weight_int4pack_mm``, ``twofour.Int4Linear``, and the time in which
torch's reduction reads as many bytes as a dense int4 weight has. A CUDA graph calls each on several weights in turn,
512 MB or more together, so that none is in the L2 cache. Figures are medians, in microseconds of one call.
"""

import argparse
import copy
import json
import pathlib
import random

import torch
import torch.nn.functional as F
from linear import LLAMA_8B, graphed, percentiles

import twofour

GROUP = 128
#: Bytes of distinct weights that a graph goes through.
DISTINCT = 512 << 20
LAYERS_OF_8B = 32


def copies(size: int) -> range:
    return range(max(4, -(-DISTINCT // size)))


def dense_bf16(rows: int, cols: int):
    weights = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in copies(rows * cols * 2)]
    return [lambda x, w=w: F.linear(x, w) for w in weights]


def torch_int4(rows: int, cols: int):
    """Two elements in a byte, and for each group a scale and a zero point."""
    elements = torch.randint(0, 256, (rows, cols // 2), device="cuda", dtype=torch.uint8)
    packed = torch._convert_weight_to_int4pack(elements, 8)
    scales = torch.randn(cols // GROUP, rows, 2, device="cuda", dtype=torch.bfloat16)
    weights = [(packed.clone(), scales.clone()) for _ in copies(rows * cols // 2)]
    return [lambda x, w=w: torch._weight_int4pack_mm(x, w[0], GROUP, w[1]) for w in weights]


def twofour_int4(rows: int, cols: int):
    layer = torch.nn.Linear(cols, rows, bias=False, device="cuda", dtype=torch.bfloat16)
    sparse = twofour.Int4Linear.from_dense(layer, group_size=GROUP, prune=True)
    return [copy.deepcopy(sparse) for _ in copies(rows * cols // 2)]


def reading(rows: int, cols: int):
    """One reduction over the bytes of all dense int4 weights, which takes what memory takes; the others of the list do
    nothing.
    """
    count = len(copies(rows * cols // 2))
    weights = torch.randint(-9, 9, (count * rows * cols // 8,), device="cuda", dtype=torch.int32)
    return [lambda _: torch.amax(weights), *[lambda _: None] * (count - 1)]


CONTENDERS = {
    "dense bf16": dense_bf16,
    "dense int4 (torch)": torch_int4,
    "2:4 int4 (twofour)": twofour_int4,
    "reading dense int4": reading,
}


def measure(functions: dict, x: torch.Tensor, rounds: int) -> dict:
    graphs = {
        name: graphed(lambda several=several: [function(x) for function in several])
        for name, several in functions.items()
    }
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name]()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / len(functions[name]) * 1e3)
    return {name: percentiles(values) for name, values in times.items()}


def told(times: dict, unit: str) -> str:
    ratio = times["dense int4 (torch)"] / times["2:4 int4 (twofour)"]
    return ", ".join(f"{name} {time:.2f} {unit}" for name, time in times.items()) + f"; 2:4 {ratio:.2f}x of dense int4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    record = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "group": GROUP,
        "rounds": arguments.rounds,
        "rows": [],
    }
    step = {tokens: dict.fromkeys(CONTENDERS, 0.0) for tokens in (1, 4, 8, 16, 32)}
    with torch.inference_mode():
        for layer, (rows, cols) in LLAMA_8B.items():
            functions = {name: make(rows, cols) for name, make in CONTENDERS.items()}
            for tokens, total in step.items():
                times = measure(
                    functions, torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16), arguments.rounds
                )
                record["rows"].append({"layer": layer, "shape": [rows, cols], "tokens": tokens, "times": times})
                medians = {name: time["us"] for name, time in times.items()}
                print(f"{tokens:3} tokens, {layer} [{rows}, {cols}]: {told(medians, 'us')}", flush=True)
                for name, us in medians.items():
                    total[name] += us * LAYERS_OF_8B / 1e3
            del functions
            torch.cuda.empty_cache()
    record["linear_ms_per_step"] = step
    for tokens, total in step.items():
        print(f"{tokens:3} tokens, linear layers of a step: {told(total, 'ms')}")
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
