"""A training step of ViT-L while another kernel holds some of the SMs, as NCCL's do under DistributedDataParallel:
dense, and 2:4 with either tile scheduler.

    python bench/python/busy_device.py [-o FILE] [--rounds N] [--held 0 16 24] [--eager]

A kernel with one thread block for each held SM, whose shared memory leaves no room for another block, runs on a stream
of its own from before the backward pass begins until the optimizer's step. Contenders are interleaved; a figure is the
median of the rounds, in milliseconds of forward pass, backward pass and optimizer. Model and sizes are those of
``vit_step.py``, with torch.compile.
"""

import argparse
import json
import pathlib
import random
import statistics

import cupy
import torch
import torch.nn.functional as F
import vit_step

import twofour

SIZE = (24, 1024, 16, 4096)

#: Runs until the host-visible flag is set.
HOLD = cupy.RawKernel(
    r"""extern "C" __global__ void hold(volatile int* released) {
        extern __shared__ int memory[];
        if (threadIdx.x == 0) { while (!*released) __nanosleep(200); memory[0] = 1; }
    }""",
    "hold",
)
SHARED_BYTES = 160 * 1024


class Busy:
    """Holds SMs between `begin` and `end`."""

    def __init__(self, count: int):
        self.count = count
        self.stream = torch.cuda.Stream()
        self.released = torch.zeros(1, dtype=torch.int32, device="cuda")
        HOLD.max_dynamic_shared_size_bytes = SHARED_BYTES

    def begin(self) -> None:
        if self.count:
            self.released.zero_()
            self.stream.wait_stream(torch.cuda.current_stream())
            with cupy.cuda.ExternalStream(self.stream.cuda_stream):
                HOLD((self.count,), (64,), (self.released.data_ptr(),), shared_mem=SHARED_BYTES)

    def end(self) -> None:
        if self.count:
            self.released.fill_(1)


class Contender:
    def __init__(self, step_of: vit_step.Contender, scheduler: str):
        self.step_of = step_of
        self.scheduler = scheduler

    def timed(self, busy: Busy) -> float:
        twofour.set_tile_scheduler(self.scheduler)
        of = self.step_of
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(of.forward(of.patches).float(), of.labels)
        busy.begin()
        loss.backward()
        busy.end()
        of.optimizer.step()
        of.optimizer.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--held", type=int, nargs="+", default=[0, 16, 24])
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    dense, sparse = (
        vit_step.Contender(is_sparse, not arguments.eager, SIZE, 32, 257, "cuda") for is_sparse in (False, True)
    )
    contenders = {
        "dense": Contender(dense, "persistent"),
        "2:4, persistent": Contender(sparse, "persistent"),
        "2:4, hardware": Contender(sparse, "hardware"),
    }
    record = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "twofour": twofour.__version__,
        "compiled": not arguments.eager,
        "results": {},
    }
    for held in arguments.held:
        busy = Busy(held)
        times = {name: [] for name in contenders}
        for number in range(arguments.rounds + 2):
            for name in random.sample(list(contenders), len(contenders)):
                elapsed = contenders[name].timed(busy)
                # The first two rounds plan, compile and allocate.
                if number > 1:
                    times[name].append(elapsed)
        medians = {name: statistics.median(found) for name, found in times.items()}
        record["results"][f"{held} SMs held"] = medians
        print(
            f"{held} SMs held:",
            {name: f"{ms:.2f} ms, {medians['dense'] / ms:.3f}x" for name, ms in medians.items()},
            flush=True,
        )
        if arguments.output:
            arguments.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
