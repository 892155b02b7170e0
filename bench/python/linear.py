"""Linear layers from PyTorch: dense ``F.linear``, a twofour weight, and torch's own 2:4 class, interleaved in one
process.

    python bench/python/linear.py [-o FILE] [--rounds N] [--quick]

On a CPU: decode (1 to 16 tokens) and prefill (512) in float32 and bfloat16, with as many threads as torch has. On a
GPU, in bfloat16: decode in a CUDA graph, prefill in float8_e4m3fn against ``torch._scaled_mm``, prefill (eager, graph
and torch.compile), forward and backward with a mask chosen in every step, and pruning both ways. Operands are random
numbers. A figure is the median over rounds; contenders take turns in shuffled order. FILE keeps its results, so a run
that was stopped goes on.
"""

import argparse
import json
import pathlib
import platform
import random
import statistics
import time
import warnings

import torch
import torch.nn.functional as F

import twofour
from twofour import operators
from twofour.sparse import to_sparse_semi_structured

#: Llama 3 8B: query, key and value together; output; gate and up together; down.
LLAMA_8B = {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
#: The shapes of torchao's training benchmark: tokens, in_features, out_features of a ViT-L's MLP.
SEEDS = {"ViT-L, first": (13008, 1024, 4096), "ViT-L, second": (13008, 4096, 1024)}


class Timer:
    """Times functions on one device."""

    def __init__(self, device: str, rounds: int):
        self.cuda = device == "cuda"
        self.rounds = rounds

    def once(self, function, calls: int) -> float:
        """Microseconds of a call."""
        if self.cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / calls * 1e3
        begun = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - begun) / calls * 1e6

    def measure(self, functions: dict) -> dict:
        """Medians and tenth and ninetieth percentiles in microseconds, by name."""
        calls = {}
        for name, function in functions.items():
            for _ in range(3):
                function()
            # A round of about ten milliseconds.
            calls[name] = max(1, min(1000, int(1e4 / max(self.once(function, 3), 1))))
        times = {name: [] for name in functions}
        for _ in range(self.rounds):
            for name in random.sample(list(functions), len(functions)):
                times[name].append(self.once(functions[name], calls[name]))
        return {name: percentiles(t) for name, t in times.items()}


def percentiles(times: list) -> dict:
    ordered = sorted(times)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {"us": statistics.median(ordered), "p10_us": at(0.1), "p90_us": at(0.9)}


def graphed(function):
    """A CUDA graph of a function, as a function."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # On the stream that has planned the calls and has their workspace.
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph.replay


def peer(dense: torch.Tensor):
    """torch's own 2:4 tensor, where torch has one for this device."""
    if dense.device.type != "cuda":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.sparse.to_sparse_semi_structured(dense)
        except (RuntimeError, NotImplementedError):
            return None


def weights(rows: int, cols: int, dtype: torch.dtype, device: str):
    """A 2:4 weight: dense with zeros, of twofour, and of torch."""
    sparse = to_sparse_semi_structured(torch.randn(rows, cols, device=device, dtype=dtype), prune=True)
    dense = sparse.to_dense()
    return dense, sparse, peer(dense)


def linear(timer: Timer, rows: int, cols: int, tokens: int, dtype: torch.dtype, device: str, way: str) -> dict:
    dense, sparse, torchs = weights(rows, cols, dtype, device)
    x = torch.randn(tokens, cols, device=device, dtype=dtype)
    functions = {"dense": lambda: F.linear(x, dense), "twofour": lambda: F.linear(x, sparse)}
    if torchs is not None and tokens >= 8:
        functions["torch's class"] = lambda: F.linear(x, torchs)
    if way == "compile":
        torch._dynamo.reset()
        functions = {
            name: torch.compile(function, mode="max-autotune-no-cudagraphs")
            for name, function in functions.items()
            if name != "torch's class"
        }
    with torch.inference_mode():
        if way == "graph":
            functions = {name: graphed(function) for name, function in functions.items()}
        return timer.measure(functions)


def float8(timer: Timer, rows: int, cols: int, tokens: int, way: str) -> dict:
    """``torch._scaled_mm`` of float8_e4m3fn, to bfloat16, with a scale for each tensor."""
    dtype = torch.float8_e4m3fn
    sparse = to_sparse_semi_structured(torch.randn(rows, cols, device="cuda").to(dtype), prune=True)
    dense, x = sparse.to_dense(), torch.randn(tokens, cols, device="cuda").to(dtype)
    scales = {
        "scale_a": torch.ones((), device="cuda"),
        "scale_b": torch.ones((), device="cuda"),
        "out_dtype": torch.bfloat16,
    }
    functions = {
        "dense": lambda: torch._scaled_mm(x, dense.t(), **scales),
        "twofour": lambda: torch._scaled_mm(x, sparse.t(), **scales),
    }
    # torch's class synchronizes here, which a graph cannot capture.
    torchs = peer(dense) if way == "eager" else None
    if torchs is not None:
        functions["torch's class"] = lambda: torch._scaled_mm(torchs, x.t(), **scales)
    with torch.inference_mode():
        if way == "graph":
            functions = {name: graphed(function) for name, function in functions.items()}
        return timer.measure(functions)


def training(timer: Timer, tokens: int, inputs: int, outputs: int, dtype: torch.dtype, device: str) -> dict:
    """Forward and backward of a layer, with the mask chosen anew in each step."""
    from twofour.sparsity.training import SemiSparseLinear

    dense = torch.nn.Linear(inputs, outputs, device=device, dtype=dtype)
    sparse = SemiSparseLinear.from_dense(torch.nn.Linear(inputs, outputs, device=device, dtype=dtype))
    x = torch.randn(tokens, inputs, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(tokens, outputs, device=device, dtype=dtype)

    def step(layer):
        def run():
            layer.zero_grad(set_to_none=True)
            x.grad = None
            layer(x).backward(dy)

        return run

    return timer.measure({"dense": step(dense), "twofour": step(sparse)})


def pruning(timer: Timer, side: int, dtype: torch.dtype, device: str) -> dict:
    """Pruning both ways, against torch's tile operator where it runs."""
    dense = torch.randn(side, side, device=device, dtype=dtype)
    rule, check = operators.RULES["greedy-signed"], False
    operator = torch.ops.twofour.pack.default
    functions = {"twofour": lambda: operator(dense, rule, 1.0, True, check)}
    if device == "cuda":
        functions["torch's tile operator"] = lambda: torch._sparse_semi_structured_tile(dense, "", use_cutlass=False)
    return timer.measure(functions)


def cases(device: str, quick: bool):
    """Names of the cases, and functions of a timer that measure them."""
    layers = dict(list(LLAMA_8B.items())[:2]) if quick else LLAMA_8B
    if device == "cpu":
        for dtype in (torch.float32, torch.bfloat16):
            for name, (rows, cols) in layers.items():
                for tokens in (1, 4, 8, 16, 512):
                    yield (
                        f"{name} [{rows}, {cols}], {tokens} tokens, {dtype}, eager",
                        lambda t, r=rows, c=cols, n=tokens, d=dtype: linear(t, r, c, n, d, device, "eager"),
                    )
        return
    dtype = torch.bfloat16
    for name, (rows, cols) in layers.items():
        for tokens, ways in ((1, ["graph"]), (8, ["graph"]), (16, ["graph"]), (4096, ["eager", "graph", "compile"])):
            for way in ways:
                yield (
                    f"{name} [{rows}, {cols}], {tokens} tokens, {dtype}, {way}",
                    lambda t, r=rows, c=cols, n=tokens, w=way: linear(t, r, c, n, dtype, device, w),
                )
    for name, (rows, cols) in layers.items():
        for way in ("eager", "graph"):
            yield (
                f"{name} [{rows}, {cols}], 4096 tokens, {torch.float8_e4m3fn}, {way}",
                lambda t, r=rows, c=cols, w=way: float8(t, r, c, 4096, w),
            )
    for name, (tokens, inputs, outputs) in SEEDS.items():
        for of in (torch.float16, torch.bfloat16):
            yield (
                f"step of {name} ({tokens}, {inputs}, {outputs}), {of}",
                lambda t, n=tokens, i=inputs, o=outputs, d=of: training(t, n, i, o, d, device),
            )
    for side in (4096, 8192, 16384):
        yield f"pruning both ways, {side}x{side}, {dtype}", lambda t, s=side: pruning(t, s, dtype, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=pathlib.Path, help="keep results in this JSON file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="two layers only")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    record = {
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "engine": "" if device == "cuda" else twofour.engine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "twofour": twofour.__version__,
        "rounds": arguments.rounds,
        "results": {},
    }
    if arguments.output and arguments.output.exists():
        record["results"] = json.loads(arguments.output.read_text())["results"]
    timer = Timer(device, arguments.rounds)
    for name, measure in cases(device, arguments.quick):
        if name not in record["results"]:
            record["results"][name] = measure(timer)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                partial = arguments.output.with_suffix(".partial")
                partial.write_text(json.dumps(record, indent=1))
                partial.replace(arguments.output)
        found = record["results"][name]
        base = found.get("dense") or found.get("torch's tile operator")
        speedup = f"{base['us'] / found['twofour']['us']:5.2f}x" if base else ""
        print(f"{name:60} {speedup}  " + ", ".join(f"{who} {t['us']:.1f} us" for who, t in found.items()), flush=True)


if __name__ == "__main__":
    main()
