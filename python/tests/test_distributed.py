"""Training on several ranks: DistributedDataParallel and FSDP2 (``fully_shard``), with gloo on CPUs and NCCL on GPUs."""

import copy
import functools
import os
import pathlib
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from twofour.sparsity.training import SemiSparseLinear, swap_linear_with_semi_sparse_linear

RANKS = 2
STEPS = 3

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch was built without distributed training")


def backends():
    return ["gloo", *(["nccl"] if torch.cuda.is_available() and torch.cuda.device_count() >= RANKS and dist.is_nccl_available() else [])]


def device_of(backend: str, rank: int) -> str:
    return f"cuda:{rank}" if backend == "nccl" else "cpu"


def model_of(device: str) -> nn.Module:
    """A model whose two linear layers are 2:4, and a dense one; the same on every rank."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    swap_linear_with_semi_sparse_linear(model, {"0": SemiSparseLinear, "2": SemiSparseLinear}, algo="largest_abs_values_greedy")
    return model.to(device)


def batch_of(rank: int, step: int, device: str):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(16, features, generator=generator).to(device) for features in (32, 8)]


def train(model: nn.Module, rank: int, device: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        x, target = batch_of(rank, step, device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()


def masks(model: nn.Module) -> list:
    return [layer.mask.cpu() for layer in model if isinstance(layer, SemiSparseLinear)]


def with_ddp(rank: int, device: str, folder: pathlib.Path) -> None:
    model = model_of(device)
    before = masks(model)
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[rank] if device != "cpu" else None)
    train(parallel, rank, device)
    torch.save({"masks": masks(model), "before": before, "weights": model.state_dict()}, folder / f"{rank}.pt")


def with_fsdp(rank: int, device: str, folder: pathlib.Path) -> None:
    model = model_of(device)
    fully_shard(model, mesh=init_device_mesh(device.split(":")[0], (RANKS,)))
    train(model, rank, device)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    # What was saved is loaded by a model that is sharded anew.
    dist.barrier()
    again = model_of(device)
    fully_shard(again, mesh=init_device_mesh(device.split(":")[0], (RANKS,)))
    saved = torch.load(folder / "whole.pt", weights_only=True)
    set_model_state_dict(again, saved, options=StateDictOptions(full_state_dict=True))
    x, _ = batch_of(0, 9, device)
    with torch.no_grad():
        torch.save({"equal": torch.equal(model(x), again(x))}, folder / f"{rank}.pt")


def process(rank: int, run, backend: str, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCH_GLOO_LAZY_INIT="0")
    device = device_of(backend, rank)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        run(rank, device, pathlib.Path(folder))
    finally:
        dist.destroy_process_group()


def launch(run, backend: str, folder: str) -> list:
    mp.start_processes(functools.partial(process, run=run, backend=backend, folder=folder), nprocs=RANKS, start_method="spawn")
    return [torch.load(pathlib.Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.fixture(params=backends())
def backend(request):
    return request.param


def test_every_rank_of_ddp_has_the_masks_of_training_on_the_whole_batch(backend):
    with tempfile.TemporaryDirectory() as folder:
        found = launch(with_ddp, backend, folder)
    for mask, other, before in zip(found[0]["masks"], found[1]["masks"], found[0]["before"], strict=True):
        assert torch.equal(mask, other)
        assert not torch.equal(mask, before), "no mask changed: this shows nothing"
    # One process with the batches of both ranks.
    device = device_of(backend, 0)
    model = model_of(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        batches = [batch_of(rank, step, device) for rank in range(RANKS)]
        x, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
    for name, weight in model.state_dict().items():
        for rank in range(RANKS):
            torch.testing.assert_close(found[rank]["weights"][name].cpu(), weight.cpu(), rtol=1e-4, atol=1e-5)


def test_fsdp_trains_saves_and_loads(backend):
    with tempfile.TemporaryDirectory() as folder:
        found = launch(with_fsdp, backend, folder)
        whole = torch.load(pathlib.Path(folder) / "whole.pt", weights_only=True)
        ddp = launch(with_ddp, backend, tempfile.mkdtemp(dir=folder))
    assert all(rank["equal"] for rank in found)
    # Both kinds of parallelism compute the same steps.
    assert set(whole) == set(ddp[0]["weights"])
    for name, weight in whole.items():
        torch.testing.assert_close(weight, ddp[0]["weights"][name].cpu(), rtol=1e-4, atol=1e-5)
    # The saved weights are those of a dense model, too.
    dense = copy.deepcopy(model_of("cpu"))
    dense.load_state_dict(whole)
