"""Training on several ranks: DistributedDataParallel and FSDP2 (``fully_shard``), with gloo on CPUs and NCCL on
GPUs."""

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
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import twofour
from twofour import pretrain
from twofour.quantization import int4_weight_only, int8_dynamic_activation_int8_weight
from twofour.sparsity import apply_fake_sparsity, block_sparse_weight, semi_sparse_weight, sparsify_
from twofour.sparsity.training import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)

RANKS = 2
STEPS = 3

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch was built without distributed training")


def backends():
    return [
        "gloo",
        *(
            ["nccl"]
            if torch.cuda.is_available() and torch.cuda.device_count() >= RANKS and dist.is_nccl_available()
            else []
        ),
    ]


def device_of(backend: str, rank: int) -> str:
    return f"cuda:{rank}" if backend == "nccl" else "cpu"


def model_of(device: str) -> nn.Module:
    """A model whose two linear layers are 2:4, and a dense one; the same on every rank."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    swap_linear_with_semi_sparse_linear(
        model, {"0": SemiSparseLinear, "2": SemiSparseLinear}, algo="largest_abs_values_greedy"
    )
    return model.to(device)


def batch_of(rank: int, step: int, device: str, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(16, features, generator=generator).to(device, dtype) for features in (32, 8)]


def train(model: nn.Module, rank: int, device: str, dtype=torch.float32) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        x, target = batch_of(rank, step, device, dtype)
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
    for convert in (
        swap_semi_sparse_linear_with_linear,
        lambda m: sparsify_(m, semi_sparse_weight()),
        lambda m: twofour.Linear.from_dense(m[0]),
    ):
        with pytest.raises(ValueError, match="its weight is sharded: load the whole state dict"):
            convert(model)
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


#: Layers that train.
TRAINING = {
    "SemiSparseLinear": lambda cols, rows: SemiSparseLinear(cols, rows, algo="largest_abs_values_greedy"),
    "SemiSparseActivationLinear": SemiSparseActivationLinear,
    "S-STE": lambda cols, rows: pretrain.SparseLinear(cols, rows, weight_gradient="dense"),
    "FST": lambda cols, rows: pretrain.SparseLinearTranspose(cols, rows, freq=2, weight_gradient="dense"),
    "STEP": pretrain.STEPLinear,
}


def steps_of(kind: str, model: nn.Module, batches: list, steps: int) -> None:
    """Trains with a batch of each rank, or with that of this one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if kind == "STEP":
        optimizer = pretrain.AdamW_STEP(model.parameters(), lr=0.01, clipping=(2, 2))
    for step in range(steps):
        optimizer.zero_grad()
        for rank in batches:
            x, target = batch_of(rank, step, "cpu")
            (nn.functional.mse_loss(model(x), target) / len(batches)).backward()
        pretrain.masked_decay_(model, 0.01)
        optimizer.step()


def with_fsdp_of_every_layer(rank: int, device: str, folder: pathlib.Path) -> None:
    found = {}
    for kind, layer in TRAINING.items():
        states = []
        for ranks in ([rank], list(range(RANKS))):
            torch.manual_seed(1)
            block = nn.Sequential(layer(32, 64), nn.GELU(), layer(64, 32), nn.LayerNorm(32))
            model = nn.Sequential(block, nn.Linear(32, 8))
            if len(ranks) == 1:
                # Each block by itself, whose hooks run in the forward pass of the model.
                mesh = init_device_mesh("cpu", (RANKS,))
                fully_shard(block, mesh=mesh)
                fully_shard(model, mesh=mesh)
            steps_of(kind, model, ranks, 4)
            states.append(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
            if kind == "STEP":
                states[-1]["phase"] = torch.tensor(model[0][0]._current_phase() == "sparse")
        found[kind] = states
    torch.save(found, folder / f"{rank}.pt")


def _taken(module: nn.Module, name: str) -> bool:
    return name in ("0", "2")


def _linear(model: nn.Module) -> nn.Module:
    for name in ("0", "2"):
        model.set_submodule(name, twofour.Linear.from_dense(model.get_submodule(name), prune=True))
    return model


#: Models whose first layers are frozen, by how they were made.
FROZEN = {
    "Linear": _linear,
    "int8": lambda model: twofour.quantize_(model, int8_dynamic_activation_int8_weight(prune=True), _taken),
    "int4": lambda model: twofour.quantize_(apply_fake_sparsity(model, _taken), int4_weight_only(), _taken),
    "sparse": lambda model: sparsify_(model, semi_sparse_weight(), _taken, prune=True),
    "sparse both ways": lambda model: sparsify_(model, semi_sparse_weight(), _taken, prune="optimal"),
    "blocks": lambda model: sparsify_(model, block_sparse_weight(8), _taken),
}


def frozen_type(device: str) -> torch.dtype:
    """What every frozen layer computes with on a device: integers on a GPU take no float32."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def frozen_of(kind: str, rank: int, device: str) -> nn.Module:
    """A model of other weights on each rank."""
    torch.manual_seed(10 + rank)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    return FROZEN[kind](model.to(device, frozen_type(device)))


def with_frozen_weights(rank: int, device: str, folder: pathlib.Path) -> None:
    found = {}
    for kind in FROZEN:
        model = frozen_of(kind, rank, device)
        parallel = nn.parallel.DistributedDataParallel(model)
        x, _ = batch_of(0, 9, device, frozen_type(device))
        with torch.no_grad():
            taken = torch.equal(frozen_of(kind, 0, device)[0](x), model[0](x))
        train(parallel, rank, device, frozen_type(device))
        with torch.no_grad():
            # In training, since running statistics are those of each rank's last batch.
            y = model(x).cpu()
        found[kind] = {"of the first rank": taken, "sent": list(parallel.named_module_buffers), "y": y}
    trainable = frozen_of("sparse", rank, device)
    trainable[0].weight.requires_grad_(True)
    try:
        nn.parallel.DistributedDataParallel(trainable)
    except NotImplementedError as error:
        found["trainable"] = str(error)
    torch.save(found, folder / f"{rank}.pt")


def shard(model: nn.Module, how: str, device: str) -> nn.Module:
    if how == "fully_shard":
        return fully_shard(model, mesh=init_device_mesh(device.split(":")[0], (RANKS,)))
    return FullyShardedDataParallel(model, device_id=torch.device(device), use_orig_params=how == "original parameters")


def with_sharded_frozen_weights(rank: int, device: str, folder: pathlib.Path) -> None:
    found = {}
    for kind in FROZEN:
        for how in ("fully_shard", "original parameters", "flat parameters"):
            model = frozen_of(kind, 0, device)
            x, _ = batch_of(0, 9, device, frozen_type(device))
            expected = model.eval()(x).detach()
            try:
                sharded = shard(model, how, device)
                with torch.no_grad():
                    same = torch.allclose(sharded(x), expected, atol=1e-5 if device == "cpu" else 1e-2)
                sharded.train()(x).sum().backward()
                state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
                found[kind, how] = same, sorted(state)
            except (NotImplementedError, ValueError) as error:
                found[kind, how] = False, str(error)
    torch.save(found, folder / f"{rank}.pt")


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
    mp.start_processes(
        functools.partial(process, run=run, backend=backend, folder=folder), nprocs=RANKS, start_method="spawn"
    )
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


def test_every_training_layer_trains_under_fully_shard_as_it_does_alone():
    with tempfile.TemporaryDirectory() as folder:
        found = launch(with_fsdp_of_every_layer, "gloo", folder)[0]
    for kind, (sharded, alone) in found.items():
        assert sharded.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(
                sharded[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, at=(kind, name): f"{at}: {text}"
            )
    assert found["STEP"][1]["phase"]


def test_frozen_weights_are_sent_once_when_ddp_wraps_a_model(backend):
    with tempfile.TemporaryDirectory() as folder:
        found = launch(with_frozen_weights, backend, folder)
    for kind in FROZEN:
        first, second = (rank[kind] for rank in found)
        # Other weights on each rank before: those of the first rank are everybody's.
        assert first["of the first rank"] and second["of the first rank"], kind
        assert torch.equal(first["y"], second["y"]), kind
        # Before each forward pass torch sends what a model changes in it, and nothing of ours.
        assert first["sent"] == ["3.running_mean", "3.running_var", "3.num_batches_tracked"], kind
    assert (
        "0.weight is a sparse tensor that needs a gradient" in found[0]["trainable"]
        and "twofour.Linear" in found[0]["trainable"]
    )


def test_fsdp_takes_layers_and_names_them_where_it_cannot_take_sparse_weights(backend):
    with tempfile.TemporaryDirectory() as folder:
        found = launch(with_sharded_frozen_weights, backend, folder)[0]
    for (kind, how), (same, said) in found.items():
        if kind in ("Linear", "int8", "int4"):
            assert same and {"0.weight_values", "0.weight_meta", "4.weight"} <= set(said), (kind, how, said)
        else:
            assert "twofour.Linear.from_dense" in said, (kind, how, said)
