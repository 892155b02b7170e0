"""What a call costs the host: ``nn.Linear`` and ``F.linear`` with a dense and with a twofour weight, per call,
interleaved.

    python bench/python/host.py [-o FILE]

Shapes are small, so that the time is that of the call. Contenders take turns in shuffled order; the figure is the
minimum of the rounds' means, and the median beside it.
"""

import argparse
import json
import platform
import random
import statistics
import time

import torch
import torch.nn.functional as F

import twofour
from twofour.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

TOKENS, FEATURES = 8, 64
CALLS, ROUNDS = 2000, 15


def contenders(device: str) -> dict:
    """Functions without arguments, by name."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(TOKENS, FEATURES, device=device, dtype=dtype)
    with_gradient = x.clone().requires_grad_()
    dense = torch.nn.Linear(FEATURES, FEATURES, bias=False, device=device, dtype=dtype)
    sparse = torch.nn.Linear(FEATURES, FEATURES, bias=False, device=device, dtype=dtype)
    weight = to_sparse_semi_structured(dense.weight.detach(), prune=True)
    sparse.weight = torch.nn.Parameter(weight, requires_grad=False)
    packed = weight.packed_weight.forward
    operator = torch.ops.twofour.linear.default
    # The same path with a kernel that does nothing: no token.
    nothing = x[:0]
    result = {
        "nn.Linear, dense": lambda: dense(x),
        "nn.Linear, twofour": lambda: sparse(x),
        "nn.Linear, twofour, empty kernel": lambda: sparse(nothing),
        "F.linear, dense": lambda: F.linear(x, dense.weight),
        "F.linear, twofour": lambda: F.linear(x, weight),
        "F.linear, twofour, empty kernel": lambda: F.linear(nothing, weight),
        "operator": lambda: operator(x, packed, FEATURES),
        "operator, empty kernel": lambda: operator(nothing, packed, FEATURES),
        "F.linear, twofour, with gradient": lambda: F.linear(with_gradient, weight),
    }
    peer = torchs_class(x, weight)
    if peer is not None:
        result["F.linear, torch's class"] = peer
    return result


def torchs_class(x: torch.Tensor, weight: SparseSemiStructuredTensor):
    """``F.linear`` with torch's own class, where torch runs it; on a CPU with a kernel that only allocates the result.
    """
    if x.device.type == "cuda":
        sparse = torch.sparse.to_sparse_semi_structured(weight.to_dense())
        return lambda: F.linear(x, sparse)
    import warnings

    class Peer(torch.sparse.SparseSemiStructuredTensorCUTLASS):
        def _mm(self, B, *, bias=None, **kwargs):
            return B.new_empty((self.shape[0], B.shape[1]))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = Peer(weight.shape, weight.to_dense(), weight.to_dense(), None, None, None)
    return lambda: F.linear(x, sparse)


def measure(functions: dict) -> dict:
    times = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(100):
            function()
    for _ in range(ROUNDS):
        for name in random.sample(list(functions), len(functions)):
            grad = "gradient" in name
            with torch.set_grad_enabled(grad):
                function = functions[name]
                start = time.perf_counter()
                for _ in range(CALLS):
                    function()
                times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: {"min_us": min(t), "median_us": statistics.median(t)} for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", help="write JSON to this file")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    found = measure(contenders(device))
    for name, us in found.items():
        print(f"{name:40} {us['min_us']:7.2f} us at least, {us['median_us']:7.2f} at the median")
    if arguments.output:
        machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
        record = {
            "machine": machine,
            "device": device,
            "torch": torch.__version__,
            "twofour": twofour.__version__,
            "results": found,
        }
        with open(arguments.output, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
