"""A training step of ViT-L under DistributedDataParallel on all GPUs of this machine, dense and with 2:4 MLPs,
interleaved; both with torch.compile.

    python bench/python/ddp_step.py [-o FILE] [--rounds N] [--gpus N ...] [--compile outside|inside]
        [--size 257|1626 ...] [--images N] [--profile]

``--compile outside`` compiles the module that DistributedDataParallel wraps around the model, in one graph for each of
its buckets; ``inside`` wraps it around the compiled model, which is one graph. Model, optimizer and sizes are those of
``vit_step.py``; each rank has a batch of its own. A figure is the median over rounds of the slowest rank's median.
"host_ms" is the time until a step that begins on an idle device returns, which is when all of it is launched: where
that is longer than the device takes, the host decides. Peak memory is rank 0's, of each model alone. After the last
round the masks of all ranks are compared. ``--profile`` prints the kernels of a step of rank 0.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import pathlib
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import vit_step

import twofour
from twofour.sparsity.training import SemiSparseLinear

SIZE = (24, 1024, 16, 4096)


def digest(model: torch.nn.Module) -> str:
    """A digest of all masks."""
    found = hashlib.sha256()
    for module in model.modules():
        if isinstance(module, SemiSparseLinear):
            found.update(module.mask.cpu().numpy().tobytes())
    return found.hexdigest()


def distributed(model: torch.nn.Module, rank: int, where: str) -> torch.nn.Module:
    """The model under DistributedDataParallel, with torch.compile outside or inside of it."""
    wrap = functools.partial(torch.nn.parallel.DistributedDataParallel, device_ids=[rank], gradient_as_bucket_view=True)
    return torch.compile(wrap(model)) if where == "outside" else wrap(torch.compile(model))


def host_ms(contender: vit_step.Contender) -> float:
    """Milliseconds until a step that begins on an idle device is launched: the median of 10."""
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        contender.step()
        times.append(1e3 * (time.perf_counter() - begun))
    torch.cuda.synchronize()
    return statistics.median(times)


def process(
    rank: int, ranks: int, rounds: int, batch: int, tokens: int, where: str, folder: str, profile: bool
) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.cuda.set_device(rank)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    contenders = {}
    for name, sparse in (("dense", False), ("2:4", True)):
        contender = vit_step.Contender(sparse, False, SIZE, batch, tokens, "cuda")
        # Another batch on every rank; the same parameters.
        torch.manual_seed(rank + 1)
        contender.patches.normal_()
        contender.forward = distributed(contender.model, rank, where)
        for _ in range(5):
            contender.step()
        contender.measure_peak()
        contenders[name] = contender
    times = {name: [] for name in contenders}
    for number in range(rounds):
        # The same order on every rank.
        for name in sorted(contenders, reverse=number % 2 == 1):
            dist.barrier()
            slowest = torch.tensor(statistics.median(contenders[name].timed(10)), device="cuda")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    hosts = {name: host_ms(contender) for name, contender in contenders.items()}
    if profile:
        for name, contender in contenders.items():
            # All ranks step: gradients are reduced.
            vit_step.print_profile(name, contender) if rank == 0 else contender.step()
    digests = [None] * ranks
    dist.all_gather_object(digests, digest(contenders["2:4"].model))
    if rank == 0:
        result = {
            name: {"ms": statistics.median(all_times), "host_ms": hosts[name], "peak_bytes": contenders[name].peak}
            for name, all_times in times.items()
        }
        result["masks_equal"] = len(set(digests)) == 1
        pathlib.Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of GPUs to measure; 1 and all unless told")
    parser.add_argument("--compile", choices=("outside", "inside"), nargs="+", default=["outside", "inside"])
    parser.add_argument(
        "--size", type=int, choices=(257, 1626), nargs="+", default=[257, 1626], help="tokens of an image"
    )
    parser.add_argument("--images", type=int, help="images of each GPU; 32 of 257 tokens and 8 of 1626 unless told")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark requires GPUs")
    record = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "twofour": twofour.__version__,
        "results": {},
    }
    gpus = arguments.gpus or sorted({1, torch.cuda.device_count()})
    for (batch, tokens), ranks, where in itertools.product(((32, 257), (8, 1626)), gpus, arguments.compile):
        if tokens not in arguments.size:
            continue
        batch = arguments.images or batch
        with tempfile.TemporaryDirectory() as folder:
            run = functools.partial(
                process,
                ranks=ranks,
                rounds=arguments.rounds,
                batch=batch,
                tokens=tokens,
                where=where,
                folder=folder,
                profile=arguments.profile,
            )
            mp.start_processes(run, nprocs=ranks, start_method="spawn")
            found = json.loads(pathlib.Path(folder, "result.json").read_text())
        record["results"][f"ViT-L, {batch}x{tokens}, {ranks} GPUs, compiled {where}"] = found
        print(
            f"{batch}x{tokens}, {ranks} GPUs, {where}: {found['dense']['ms'] / found['2:4']['ms']:.3f}x",
            found,
            flush=True,
        )
        if arguments.out:
            arguments.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
