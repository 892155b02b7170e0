"""Times PyTorch's dense linear on this machine's CPU, on the shapes of `twofour-bench cpu`, for the record.

    python3 bench/peers/pytorch_cpu.py --threads 1,2 --json out.json

f32 and bf16 through `torch.nn.functional.linear` (MKL, oneDNN); int8 through `torch._int_mm`, and through the
dynamically quantised linear where this PyTorch has an engine for it. Weights rotate over enough copies that no cache
holds them; medians of the time that the caller sees.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import warnings

import torch
import torch.nn.functional as F

warnings.filterwarnings("ignore")

# The works of `twofour-bench cpu`.
DTYPES = ("f32", "bf16", "i8")
WORKS = [("decode", d, s, t) for d in DTYPES for s in ((14336, 4096), (4096, 14336)) for t in (1, 4, 16)]
WORKS += [
    ("prefill", d, (4096, 4096), t)
    for d, tokens in (("f32", (512, 2048)), ("bf16", (512,)), ("i8", (512,)))
    for t in tokens
]
SIZE = {"f32": 4, "bf16": 2, "i8": 1}


def cache_bytes():
    """The largest cache that Linux reports, or 64 MiB."""
    best = 0
    for index in range(8):
        try:
            text = open(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size").read().strip()
        except OSError:
            continue
        best = max(best, int(text[:-1]) << {"K": 10, "M": 20}.get(text[-1], 0))
    return best or 64 << 20


def rotation_bytes():
    """What must be read before a weight's turn comes again: the rule of `twofour-bench cpu`."""
    cache = cache_bytes()
    return max(2 * cache, 700 << 20 if cache >= 200 << 20 else 256 << 20)


def dynamic_quantized(out_features, in_features):
    linear = torch.nn.Sequential(torch.nn.Linear(in_features, out_features, bias=False))
    return torch.ao.quantization.quantize_dynamic(linear, {torch.nn.Linear}, dtype=torch.qint8)


def contenders(dtype, shape, tokens, copies):
    """Yields (name, calls): calling calls[i]() multiplies by copy i of the weight."""
    out_features, in_features = shape
    if dtype in ("f32", "bf16"):
        kind = torch.float32 if dtype == "f32" else torch.bfloat16
        x = torch.randn(tokens, in_features).to(kind)
        weights = [torch.randn(out_features, in_features).to(kind) for _ in range(copies)]
        yield "pytorch", [lambda w=w: F.linear(x, w) for w in weights]
        return
    x8 = torch.randint(-127, 128, (tokens, in_features), dtype=torch.int8)
    weights = [torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8) for _ in range(copies)]
    yield "pytorch _int_mm", [lambda w=w: torch._int_mm(x8, w.t()) for w in weights]
    try:
        layers = [dynamic_quantized(out_features, in_features) for _ in range(copies)]
    except Exception as error:  # the module or its engine is missing from some builds
        print(f"no dynamically quantised linear here: {error}", file=sys.stderr)
        return
    x = torch.randn(tokens, in_features)
    yield "pytorch dynamic int8", [lambda m=m: m(x) for m in layers]


def measure(calls, seconds):
    calls[0]()
    times, start, i = [], time.perf_counter(), 0
    while len(times) < 5 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        calls[i % len(calls)]()
        times.append(1e6 * (time.perf_counter() - before))
        i += 1
    return times


def cpu_name():
    try:
        return next(line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each contender")
    parser.add_argument("--works", default="decode,prefill", help="kinds of work to time")
    parser.add_argument(
        "--dtypes",
        default=",".join(DTYPES),
        help="a CPU without bf16 or VNNI instructions takes minutes for bf16 and i8",
    )
    parser.add_argument("--json", help="write the rows to this file, in the form of `twofour-bench cpu`")
    args = parser.parse_args()
    works = [w for w in WORKS if w[0] in args.works.split(",") and w[1] in args.dtypes.split(",")]
    if not works:
        parser.error("--works and --dtypes leave nothing to time")
    rows = []
    with torch.inference_mode():
        for threads in (int(t) for t in args.threads.split(",")):
            torch.set_num_threads(threads)
            for work, dtype, shape, tokens in works:
                weight_bytes = shape[0] * shape[1] * SIZE[dtype]
                copies = -(-rotation_bytes() // weight_bytes) + 1
                for name, calls in contenders(dtype, shape, tokens, copies):
                    try:
                        times = measure(calls, args.seconds)
                    except RuntimeError as error:  # _int_mm refuses few tokens on some versions
                        print(f"{name} {dtype} {shape} {tokens}: {str(error).splitlines()[0]}", file=sys.stderr)
                        continue
                    row = {
                        "work": work,
                        "dtype": dtype,
                        "shape": shape,
                        "tokens": tokens,
                        "threads": threads,
                        "contender": name,
                    }
                    row |= {
                        "median_us": statistics.median(times),
                        "min_us": min(times),
                        "max_us": max(times),
                        "rounds": len(times),
                    }
                    row |= {"weight_bytes": weight_bytes, "gb_per_s": 1e-3 * weight_bytes / row["median_us"]}
                    rows.append(row)
                    print(
                        f"{threads} thr {work:8}{dtype:5}{shape!s:15}{tokens:5} tok "
                        f" {name:22}{row['median_us']:12.1f} us",
                        flush=True,
                    )
    machine = {"cpu": cpu_name(), "torch": torch.__version__}
    command = (
        f"python3 bench/peers/pytorch_cpu.py --threads {args.threads} --works {args.works} --dtypes {args.dtypes}"
        f" --seconds {args.seconds}"
    )
    result = {"machine": machine, "command": command, "rows": rows}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


main()
