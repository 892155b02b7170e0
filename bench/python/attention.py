"""Attention forward and backward by ``scaled_dot_product_attention``, each of torch's engines: the contenders of
``twofour-bench cuda attention``.

    python bench/python/attention.py [-o FILE] [--rounds N]

bf16, random data, contiguous ``[batch, heads, positions, head_dim]``. Engines take turns in shuffled order; the figure
is the median of times between CUDA events, with a cold L2.
"""

import argparse
import json
import pathlib
import random
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Those of the suite: sequences, positions, heads, elements of a head, causal.
SHAPES = (
    (32, 257, 16, 64, False),
    (8, 1626, 16, 64, False),
    (8, 1024, 20, 64, True),
    (32, 256, 12, 64, True),
    (2, 4096, 32, 128, True),
    (16, 512, 8, 32, True),
    (64, 64, 12, 64, False),
    (64, 128, 12, 64, False),
    (16, 577, 12, 64, False),
    (64, 128, 12, 64, True),
    (20, 384, 12, 64, True),
    (16, 512, 12, 64, True),
    (16, 256, 16, 128, True),
    (8, 512, 16, 128, True),
)
ENGINES = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Contender:
    """Attention of one shape by one engine."""

    def __init__(self, engine: SDPBackend, shape: tuple) -> None:
        batch, positions, heads, head_dim, self.causal = shape
        self.engine = engine
        make = lambda: torch.randn(batch, heads, positions, head_dim, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.inputs = [make().requires_grad_() for _ in range(3)]
        self.gradient = make()
        self.forward()
        self.backward()

    def forward(self) -> None:
        with sdpa_kernel(self.engine):
            self.out = F.scaled_dot_product_attention(*self.inputs, is_causal=self.causal)

    def backward(self) -> None:
        torch.autograd.grad(self.out, self.inputs, self.gradient, retain_graph=True)

    def both(self) -> None:
        self.forward()
        self.backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark requires a GPU")
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    record = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "rows": [],
    }
    for shape in SHAPES:
        contenders = {}
        for name, engine in ENGINES.items():
            try:
                contenders[name] = Contender(engine, shape)
            except RuntimeError as error:
                print(f"{shape}: {name} does not compute it: {error}".splitlines()[0])
        works = [(name, part) for name in contenders for part in ("forward", "backward", "both")]
        times = {work: [] for work in works}
        for number in range(arguments.rounds + 3):
            random.shuffle(works)
            for name, part in works:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                flush.zero_()
                # The host is ahead of the device when the first event passes.
                torch.cuda._sleep(2_000_000)
                begin.record()
                getattr(contenders[name], part)()
                end.record()
                end.synchronize()
                if number >= 3:
                    times[name, part].append(begin.elapsed_time(end) * 1e3)
        batch, positions, heads, head_dim, causal = shape
        product = 2 * batch * heads * positions**2 * head_dim / (2 if causal else 1)
        for (name, part), taken in sorted(times.items()):
            us = statistics.median(taken)
            products = {"forward": 2, "backward": 5, "both": 7}[part]
            row = {
                "shape": shape[:4],
                "causal": causal,
                "contender": name,
                "part": part,
                "us": us,
                "tflops": products * product / us * 1e-6,
            }
            record["rows"].append(row)
            print(row, flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
