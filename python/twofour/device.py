"""What the package computes on."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform

from . import _native


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees.

    Attributes:
        name: its name.
        capability: its compute capability, (9, 0) for an H100.
        memory: its memory in bytes.
        sparse_tensor_cores: whether it multiplies 2:4 matrices in hardware: from capability (8, 0) on.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    sparse_tensor_cores: bool


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """Versions, the CPU's engine, and the GPUs.

    Attributes:
        version: of this package.
        machine: the processor's architecture.
        engine: the engine of kernels that runs on this CPU, ``"avx512"`` for instance.
        cores: logical cores that this process may use.
        torch: torch's version, or ``None`` where it is not installed.
        threads: threads that torch computes with, and so this package; ``None`` without torch.
        gpus: the GPUs.
    """

    version: str
    machine: str
    engine: str
    cores: int
    torch: str | None
    threads: int | None
    gpus: tuple[Gpu, ...]

    def __str__(self) -> str:
        lines = [f"twofour {self.version}, engine {self.engine} on {self.machine}, {self.cores} cores"]
        lines.append("torch is not installed" if self.torch is None else f"torch {self.torch}, {self.threads} threads")
        for index, gpu in enumerate(self.gpus):
            cores = "sparse tensor cores" if gpu.sparse_tensor_cores else "no sparse tensor cores"
            major, minor = gpu.capability
            lines.append(f"GPU {index}: {gpu.name}, capability {major}.{minor}, {gpu.memory / 2**30:.0f} GiB, {cores}")
        return "\n".join(lines)


def device_info() -> DeviceInfo:
    """What the package computes on: the CPU's engine, torch, and the GPUs that torch sees.

    Raises:
        RuntimeError: where the environment asks for an engine that this CPU does not have.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    version, threads, gpus = None, None, ()
    if importlib.util.find_spec("torch"):
        import torch

        version, threads = torch.__version__, torch.get_num_threads()
        if torch.cuda.is_available():
            gpus = tuple(_gpu(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count()))
    return DeviceInfo(_native.__version__, platform.machine(), _native.engine(), cores, version, threads, gpus)


def _gpu(properties) -> Gpu:
    capability = (properties.major, properties.minor)
    return Gpu(properties.name, capability, properties.total_memory, capability >= (8, 0))
