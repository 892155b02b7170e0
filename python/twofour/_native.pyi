"""The native part of the package. Written by python/stubs.py: run it again instead of editing this file."""

import os
from typing import Self, final

import numpy as np
import numpy.typing as npt

ACTIVATIONS: dict[str, int]
ESTIMATORS: dict[str, int]
MASK_RULES: dict[str, int]
STORED_DTYPES: dict[str, str]
TORCH_DTYPES: dict[str, int]
__version__: str

def add_site_packages(folder: str | os.PathLike[str]) -> None:
    """Adds a `site-packages` folder in which NVRTC and NVIDIA's other libraries are searched."""

def compress(
    matrix: npt.NDArray[np.uint8],
    dtype: str,
    rows: int,
    cols: int,
    prune: bool,
    name: str,
    values: npt.NDArray[np.uint8],
    meta: npt.NDArray[np.uint8],
) -> None:
    """Writes the values and metadata of a matrix that is 2:4, or is to be pruned by magnitude, to `values` and
    `meta`. `name`, where not empty, is the tensor's name in errors.
    """

def compress_bitmask(
    kept: npt.NDArray[np.uint8],
    bitmask: npt.NDArray[np.uint8],
    dtype: str,
    rows: int,
    cols: int,
    name: str,
    values: npt.NDArray[np.uint8],
    meta: npt.NDArray[np.uint8],
) -> None:
    """Writes the values and metadata of a weight in the format `sparse-24-bitmask`: its kept values and a bit for
    each element.
    """

def decompress(
    values: npt.NDArray[np.uint8],
    meta: npt.NDArray[np.uint8],
    dtype: str,
    rows: int,
    cols: int,
    out: npt.NDArray[np.uint8],
) -> None:
    """Writes the dense matrix of values and metadata, whose rules are checked, to `out`."""

def decompress_int4(
    values: npt.NDArray[np.uint8],
    meta: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    rows: int,
    cols: int,
    group_size: int,
    out: npt.NDArray[np.uint8],
) -> None:
    """Writes the dense float32 matrix of values, metadata and float16 scales, whose rules are checked, to `out`:
    integers times scales.
    """

def engine() -> str:
    """The engine that multiplies on this CPU."""

def prune(
    matrix: npt.NDArray[np.uint8],
    dtype: str,
    rows: int,
    cols: int,
    pattern: str,
    axis: int,
    method: str,
    out: npt.NDArray[np.uint8],
) -> None:
    """Writes the pruned matrix to `out`."""

def reasons_to_stay_dense(tensors: list[tuple[str, list[int]]], has_conv1d: bool) -> list[str | None]:
    """Why each tensor of a model is not to be pruned; `None` for the weights of linear layers that are.

    `tensors` are the names and shapes of all of them; `has_conv1d` says that some layers are transformers'
    `Conv1D`.
    """

def register_torch(libtorch_cpu: str, libtorch_cuda: str | None = None) -> list[tuple[str, bool, bool, bool]]:
    """Registers the kernels of `torch.ops.twofour` with the torch whose libraries are at these paths.

    Returns of each operator the schema to define, whether the leading dimensions of its first argument are rows,
    whether it is a GEMM, and whether it has [`result_shapes`]; a second call does nothing and returns none.
    """

def result_shapes(operator: str, arguments: tuple[object, ...]) -> list[tuple[tuple[object, ...], str | None]]:
    """The sizes and the dtype's name, or `None` for that of the first argument, of each result of an operator with
    these arguments, all of its schema. Sizes may be torch's symbols.
    """

def set_tile_scheduler(scheduler: str) -> None:
    """Sets how the tiles of large GEMMs are assigned to a GPU's thread blocks, `"persistent"` or `"hardware"`, from
    the next call on and for all devices.
    """

def store_converted(
    matrix: tuple[str, tuple[int, int], tuple[int, int], str],
    parts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]],
    to: str,
    to_block: tuple[int, int],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """The parts of a sparse matrix in another store, after those that it has were checked."""

def store_linear(
    weight: tuple[str, tuple[int, int], tuple[int, int], str],
    parts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]],
    x: npt.NDArray[np.uint8],
    tokens: int,
    bias: npt.NDArray[np.float32] | None,
    out: npt.NDArray[np.uint8],
) -> None:
    """Writes `x · Wᵀ + bias` to `out`, for a sparse weight and `x` of `tokens` rows of its dtype."""

def store_of_dense(
    matrix: npt.NDArray[np.uint8],
    dtype: str,
    rows: int,
    cols: int,
    form: str,
    block: tuple[int, int],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """The parts of a dense matrix in a store."""

def store_to_dense(
    matrix: tuple[str, tuple[int, int], tuple[int, int], str],
    parts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]],
    out: npt.NDArray[np.uint8],
) -> None:
    """Writes the dense matrix of a sparse one to `out`."""

def verdict(median: float, low: float, high: float) -> str:
    """`"faster"`, `"slower"`, `"as fast"` or `"too noisy"`, for the median of a speedup and the ends of an interval
    that is likely to contain the true one.
    """

def verify(
    matrix: npt.NDArray[np.uint8],
    dtype: str,
    rows: int,
    cols: int,
    pattern: str,
    axis: int,
    places: int,
) -> tuple[int, int, list[tuple[int | None, int | None, int | None, int | None, int, int]], int]:
    """Checks a matrix against a pattern along axis 0 or 1."""

@final
class FileReader:
    """A model on disk, whose headers are checked."""

    def __new__(cls, path: str | os.PathLike[str]) -> Self: ...

    def tensors(self) -> list[tuple[str, str, list[int]]]:
        """(name, safetensors dtype, shape) of the tensors that are no parts of compressed weights."""

    def weights(self) -> list[tuple[str, str, int, int, int | None]]:
        """(name, dtype, rows, cols, group size of the scales) of the compressed weights; -1 stands for a scale for
        each row, `None` for no scales.
        """

    def metadata(self) -> dict[str, str]:
        """The metadata of the header."""

    def read(self, name: str, out: npt.NDArray[np.uint8]) -> None:
        """Reads the bytes of a tensor into `out`."""

    def read_compressed(
        self,
        name: str,
        values: npt.NDArray[np.uint8],
        meta: npt.NDArray[np.uint8],
        scales: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Reads values, metadata and, where it has them, scales of a compressed weight, after checking every rule
        of the canonical form.
        """

@final
class FileWriter:
    """A file in the making. It appears under its name, complete, when it is finished; one that is dropped before
    leaves nothing.
    """

    def __new__(
        cls,
        path: str | os.PathLike[str],
        overwrite: bool,
        tensors: list[tuple[str, str, list[int]]],
        weights: list[tuple[str, str, int, int, int | None]],
        metadata: dict[str, str],
    ) -> Self: ...

    def write(self, name: str, bytes: npt.NDArray[np.uint8]) -> None:
        """Writes the bytes of one tensor."""

    def write_compressed(
        self,
        name: str,
        values: npt.NDArray[np.uint8],
        meta: npt.NDArray[np.uint8],
        scales: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Writes values, metadata and, where they were planned, scales of a compressed weight, after checking every
        rule of the canonical form.
        """

    def finish(self) -> None:
        """Brings the file to the disk and gives it its name."""

@final
class LayerInputs:
    """The inputs of a linear layer, and those that it has in the dense model beside them."""

    def __new__(cls, features: int) -> Self: ...

    def add(self, inputs: npt.NDArray[np.uint8], dense: npt.NDArray[np.uint8] | None = None) -> None:
        """Adds float32 inputs, `[tokens, features]` as bytes, and those of the same tokens in the dense model.
        These are given with every batch or with none.
        """

    def prune(
        self,
        matrix: npt.NDArray[np.uint8],
        dtype: str,
        rows: int,
        pattern: str,
        method_name: str,
        swaps: int,
        refit: int,
        compensation: float,
        out: npt.NDArray[np.uint8],
    ) -> None:
        """Writes the pruned matrix to `out`."""

    def rank(self, rank: str, rows: int) -> int:
        """The rank that a number, or a share such as `5%`, is for a matrix of so many rows."""

    def low_rank(
        self,
        matrix: npt.NDArray[np.uint8],
        rows: int,
        rank: int,
        left: npt.NDArray[np.uint8],
        right: npt.NDArray[np.uint8],
    ) -> None:
        """Writes the factors of a float32 matrix, `[rows, rank]` and `[rank, features]`, to `left` and `right`."""

@final
class StepSwitch:
    """Decides when the variances of masked parameters have settled (STEP, Lu et al., ICML 2023)."""

    def __new__(
        cls,
        window: int,
        option: int,
        bounds: tuple[int, int] | None,
        steps: int,
        switched_at: int | None,
        changes: list[float],
    ) -> Self: ...

    def advance(self) -> None:
        """Counts a step."""

    def observe(self, sum: float, elements: int, threshold: float) -> bool:
        """Takes note of the sum of this step's changes over so many elements; whether training switches now."""

    def steps(self) -> int:
        """Steps so far."""

    def switched_at(self) -> int | None:
        """The step after which training switched, or `None`."""

    def changes(self) -> list[float]:
        """The means of the last steps, oldest first."""
