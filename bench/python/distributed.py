"""Training steps on several GPUs, with DistributedDataParallel and with FSDP2: dense, and with 2:4 MLPs, interleaved.

    python bench/python/distributed.py [-o FILE] [--models vit-l:32x257 gpt-1024:32x257 gpt-2048:4x2048]
        [--paths ddp fsdp2] [--gpus N] [--rounds N] [--profile FOLDER] [--tiny]

A model is ``NAME:BATCHxTOKENS``: ViT-L as in ``vit_step.py``, or eight blocks of the GPT of ``training.py``, by their
width. Each rank has a batch of its own. ``ddp`` compiles the module that DistributedDataParallel wraps around a
model, with bfloat16 autocast; ``ddp-inside`` wraps it around the compiled model. ``fsdp2`` compiles and shards each
block, and gathers bfloat16. fused AdamW over float32. A figure is the median over rounds of the slowest rank's mean
of five steps. "host" is the time until a step that begins on an idle device returns, which is when all of it is
launched: where that is longer than the device takes, the host decides. Peak memory is rank 0's, of each model alone.
After the last round the masks of all ranks are compared, but for ``fsdp2``, whose ranks choose masks from the same
gathered weight. FILE gets a list of rows, to which a further run adds. ``--profile`` writes the table of the kernels
of a step of rank 0. ``--tiny`` shows on CPUs that the program runs.
"""

import argparse
import functools
import gc
import hashlib
import json
import pathlib
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import training
import vit_step
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from twofour.sparsity.training import SemiSparseLinear, swap_linear_with_semi_sparse_linear

GPT_BLOCKS = 8
WARM_UP, STEPS = 5, 5


def build(name: str, tokens: int) -> tuple[nn.Module, list[str], int]:
    """A model, the names of its blocks, and the features of its input."""
    torch.manual_seed(0)
    if name == "vit-l":
        model = vit_step.Vit(24, 1024, 16, 4096, tokens)
        return model, [f"blocks.{i}" for i in range(len(model.blocks))], vit_step.PATCH
    width = int(name.removeprefix("gpt-"))
    return nn.Sequential(*(training.Block(width) for _ in range(GPT_BLOCKS))), list(map(str, range(GPT_BLOCKS))), width


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Of classes, against labels; of a GPT's hidden states, their mean square."""
    if output.dim() == 2:
        labels = torch.arange(output.shape[0], device=output.device) % output.shape[1]
        return F.cross_entropy(output.float(), labels)
    return output.float().pow(2).mean()


class Contender:
    """A model under one kind of parallelism, its optimizer, and its step."""

    def __init__(self, name: str, batch: int, tokens: int, sparse: bool, path: str, device: torch.device):
        self.device = device
        self.before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        self.model, blocks, features = build(name, tokens)
        self.model.to(device)
        if sparse:
            mlps = [name for name, _ in self.model.named_modules() if name.endswith((".up", ".down"))]
            swap_linear_with_semi_sparse_linear(
                self.model, dict.fromkeys(mlps, SemiSparseLinear), algo="largest_abs_values_greedy"
            )
        self.autocast = path != "fsdp2"
        if path == "fsdp2":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for name in blocks:
                block = torch.compile(self.model.get_submodule(name))
                fully_shard(block, mp_policy=policy)
                self.model.set_submodule(name, block)
            self.forward = fully_shard(self.model, mp_policy=policy)
        else:
            ids = [device.index] if device.type == "cuda" else None
            wrap = functools.partial(nn.parallel.DistributedDataParallel, device_ids=ids, gradient_as_bucket_view=True)
            inside = path == "ddp-inside"
            self.forward = wrap(torch.compile(self.model)) if inside else torch.compile(wrap(self.model))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(1 + dist.get_rank())
        self.x = torch.randn(batch, tokens, features, device=device)
        for _ in range(WARM_UP):
            self.step()
        self.peak = self.measured_peak()

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = loss_of(self.forward(self.x))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measured_peak(self) -> int | None:
        """Bytes that a step of this contender alone takes at most."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.before

    def timed(self) -> tuple[float, float]:
        """Milliseconds of a step, the mean of some in a row, and of launching one that begins on an idle device."""
        dist.barrier()
        self.synchronize()
        begun = time.perf_counter()
        self.step()
        host = time.perf_counter() - begun
        for _ in range(STEPS - 1):
            self.step()
        self.synchronize()
        return 1e3 * (time.perf_counter() - begun) / STEPS, 1e3 * host

    def masks(self) -> str:
        """A digest of all masks."""
        found = hashlib.sha256()
        for module in self.model.modules():
            if isinstance(module, SemiSparseLinear):
                found.update(module.mask.cpu().numpy().tobytes())
        return found.hexdigest()


def measure(model: str, path: str, rounds: int, profile: pathlib.Path | None, device: torch.device) -> dict:
    """A row."""
    name, size = model.split(":")
    batch, tokens = map(int, size.split("x"))
    torch._dynamo.reset()
    contenders = {
        form: Contender(name, batch, tokens, form == "2:4", path, device) for form in ("dense", "2:4")
    }
    times, hosts = {form: [] for form in contenders}, {form: [] for form in contenders}
    for number in range(rounds):
        # The same order on every rank.
        for form in sorted(contenders, reverse=number % 2 == 1):
            both = torch.tensor(contenders[form].timed(), device=device)
            dist.all_reduce(both, dist.ReduceOp.MAX)
            times[form].append(both[0].item())
            hosts[form].append(both[1].item())
    if profile is not None:
        for form, contender in contenders.items():
            activities = [torch.profiler.ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            with torch.profiler.profile(activities=activities) as found:
                contender.step()
                contender.synchronize()
            by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
            if dist.get_rank() == 0:
                profile.mkdir(parents=True, exist_ok=True)
                table = found.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=90)
                (profile / f"{name}-{path}-{form.replace(':', '-')}.txt").write_text(table)
    digests = [None] * dist.get_world_size()
    if path != "fsdp2":
        dist.all_gather_object(digests, contenders["2:4"].masks())
    dense, ours = (statistics.median(times[form]) for form in contenders)
    return {
        "model": name if name == "vit-l" else f"gpt-{GPT_BLOCKS}-blocks-{name.removeprefix('gpt-')}",
        "path": path,
        "gpus": dist.get_world_size(),
        "batch": batch,
        "tokens": tokens,
        "form": "SemiSparseLinear",
        "dense_ms": dense,
        "ours_ms": ours,
        "dense_host_ms": statistics.median(hosts["dense"]),
        "ours_host_ms": statistics.median(hosts["2:4"]),
        "dense_bytes": contenders["dense"].peak,
        "ours_bytes": contenders["2:4"].peak,
        "speedup": dense / ours,
        "masks_equal": None if path == "fsdp2" else len(set(digests)) == 1,
    }


def process(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    device = torch.device("cpu") if arguments.tiny else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group(
        "gloo" if arguments.tiny else "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=arguments.gpus,
    )
    rows = json.loads(arguments.output.read_text()) if arguments.output and arguments.output.exists() else []
    started = time.perf_counter()
    for model in arguments.models:
        for path in arguments.paths:
            row = measure(model, path, arguments.rounds, arguments.profile, device)
            if rank == 0:
                print(f"{row}, after {time.perf_counter() - started:.0f} s", flush=True)
                rows.append(row)
                if arguments.output:
                    arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=pathlib.Path, help="adds rows to this file")
    parser.add_argument("--models", nargs="+", default=["vit-l:32x257", "gpt-1024:32x257", "gpt-2048:4x2048"])
    parser.add_argument("--paths", nargs="+", choices=("ddp", "ddp-inside", "fsdp2"), default=["ddp", "fsdp2"])
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="ranks; all GPUs unless told")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--profile", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--tiny", action="store_true", help="two ranks on CPUs, a tiny model: no figures")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.models, arguments.gpus, arguments.rounds = ["gpt-64:2x16"], 2, 1
    elif not arguments.gpus:
        raise SystemExit("this benchmark requires GPUs; --tiny shows that it runs")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(process, args=(arguments, folder), nprocs=arguments.gpus, start_method="spawn")


if __name__ == "__main__":
    main()
