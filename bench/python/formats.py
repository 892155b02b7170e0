"""Int4 2:4 weights and block-sparse weights from PyTorch, against dense ``F.linear``, interleaved in one process.

    python bench/python/formats.py [-o FILE] [--rounds N] [--threads N] [--device cuda] [int4] [blocks]

On a CPU: int4 (groups of 128) beside a 2:4 weight of the activations' type, and weights of which 80, 90 and 95 % of the
blocks of 64 are zero, forward and input gradient, in float32. On a GPU: the blocks, in bfloat16. Operands are random
numbers. A figure is the median over rounds; contenders take turns in shuffled order.
"""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from linear import Timer

from twofour import operators
from twofour.sparse import to_sparse_semi_structured
from twofour.sparsity import BlockSparseTensor

BLOCK = 64


def int4(timer: Timer) -> list:
    """A row for each shape, dtype and number of tokens."""
    rows = []
    for out, inn in [(4096, 4096), (14336, 4096)]:
        sparse = to_sparse_semi_structured(torch.randn(out, inn), prune=True).to_dense()
        packed = operators.pack_int4(*operators.quantize_int4(sparse, 128), inn, 128)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            dense, half = sparse.to(dtype), to_sparse_semi_structured(sparse.to(dtype))
            for tokens in (1, 4, 16, 128):
                x = torch.randn(tokens, inn).to(dtype)
                times = timer.measure(
                    {
                        "dense": lambda: F.linear(x, dense),
                        "2:4": lambda: F.linear(x, half),
                        "int4": lambda: operators.linear_int4(x, packed, out, 128),
                    }
                )
                rows.append({"shape": [out, inn], "dtype": str(dtype), "tokens": tokens, **times})
                show(rows[-1])
    return rows


def blocks(timer: Timer) -> list:
    """A row for each shape, share of zeros and number of tokens."""
    rows = []
    kind = {"device": "cuda", "dtype": torch.bfloat16} if timer.cuda else {"device": "cpu", "dtype": torch.float32}
    sizes, numbers = ((4096, 8192), (1, 16, 256, 4096)) if timer.cuda else ((512, 1024, 4096), (1, 16, 256))
    for size in sizes:
        for zeros in (0.8, 0.9, 0.95):
            kept = torch.rand(size // BLOCK, size // BLOCK) >= zeros
            kept = kept.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            dense = (torch.randn(size, size) * kept).to(**kind)
            weight = BlockSparseTensor.from_dense(dense, BLOCK)
            for tokens in numbers:
                x = torch.randn(tokens, size, **kind)
                functions = {"dense": lambda: F.linear(x, dense), "blocks": lambda: F.linear(x, weight)}
                rows.append({"shape": [size, size], "zeros": zeros, "tokens": tokens, **timer.measure(functions)})
                show(rows[-1])
            x, dy = torch.randn(256, size, **kind, requires_grad=True), torch.randn(256, size, **kind)
            functions = {
                "dense": lambda: torch.autograd.grad(F.linear(x, dense), x, dy),
                "blocks": lambda: torch.autograd.grad(F.linear(x, weight), x, dy),
            }
            with torch.enable_grad():
                times = timer.measure(functions)
            rows.append({"shape": [size, size], "zeros": zeros, "tokens": 256, "gradient": True, **times})
            show(rows[-1])
    return rows


def show(row: dict) -> None:
    times = {name: value["us"] for name, value in row.items() if isinstance(value, dict)}
    what = ", ".join(f"{name} {value}" for name, value in row.items() if not isinstance(value, dict))
    print(what + ":", *(f"{name} {us:.0f} us ({times['dense'] / us:.2f}x)" for name, us in times.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="int4|blocks", help="both by default, on a GPU the blocks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    timer = Timer(arguments.device, arguments.rounds)
    what = arguments.what or (("blocks",) if timer.cuda else ("int4", "blocks"))
    if timer.cuda and "int4" in what:
        parser.error("int4 is measured on a CPU; bench/python/int4.py measures it on a GPU")
    with torch.no_grad():
        results = {name: {"int4": int4, "blocks": blocks}[name](timer) for name in what}
    if arguments.output:
        arguments.output.write_text(
            json.dumps({"torch": torch.__version__, "threads": arguments.threads, **results}, indent=1)
        )


if __name__ == "__main__":
    main()
