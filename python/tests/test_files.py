"""save_file, load_file, load_model, and the command line tool on the same files."""

import json
import os

import numpy as np
import pytest
import safetensors.torch
import torch
from command import command, needs_command
from torch import nn

import twofour
from twofour.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def sparse(rows, cols, dtype=torch.float32, device="cpu"):
    return to_sparse_semi_structured(torch.randn(rows, cols, device=device).to(dtype), prune=True)


class Net(nn.Module):
    """Layers of several kinds and odd shapes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 20)
        self.up = nn.Linear(20, 70)
        self.down = nn.Linear(70, 9, bias=False)
        self.norm = nn.LayerNorm(9)

    def forward(self, tokens):
        return self.norm(self.down(torch.relu(self.up(self.embed(tokens)))))


def sparse_net(device="cpu"):
    net = Net().to(device).requires_grad_(False)
    net.up = twofour.Linear.from_dense(net.up, prune=True)
    net.down.weight = nn.Parameter(to_sparse_semi_structured(net.down.weight, prune=True), requires_grad=False)
    return net


@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_come_back(tmp_path, device, dtype):
    path = tmp_path / "w.safetensors"
    tensors = {
        "a.weight": sparse(37, 70, dtype, device),
        "b": torch.randn(3, 4, 5, device=device).to(dtype),
        "c": torch.arange(4),
        "scalar": torch.tensor(True),
        "int8": twofour.compress(twofour.prune(torch.randint(-128, 128, (5, 12), dtype=torch.int8))),
    }
    twofour.save_file(tensors, path, metadata={"step": "7"})
    loaded = twofour.load_file(path, device=device)
    assert loaded.keys() == tensors.keys()
    assert isinstance(loaded["a.weight"], SparseSemiStructuredTensor)
    assert torch.equal(loaded["a.weight"].to_dense(), tensors["a.weight"].to_dense())
    for name in ("b", "c", "scalar"):
        assert torch.equal(loaded[name].cpu(), tensors[name].cpu()) and loaded[name].dtype == tensors[name].dtype
    assert loaded["int8"].dtype == "int8" and torch.equal(loaded["int8"].to_dense().cpu(), tensors["int8"].to_dense())
    assert all(t.device.type == device for t in loaded.values() if isinstance(t, torch.Tensor))
    # Every safetensors reader sees the parts.
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["step"] == "7" and file.metadata()["format"] == "pt"
        assert json.loads(file.metadata()["twofour"])["weights"]["a.weight"]["shape"] == [37, 70]
        assert set(file.keys()) == {"a.weight.values", "a.weight.meta", "int8.values", "int8.meta", "b", "c", "scalar"}
    # 9/16 of 16-bit weights, plus the padding of odd rows.
    assert os.path.getsize(path) < 37 * 36 * dtype.itemsize + 37 * 3 * 4 + 60 * dtype.itemsize + 2000


def test_numpy_reads_what_torch_wrote_and_back(tmp_path):
    weight = sparse(16, 32)
    half = torch.randn(4).to(torch.bfloat16)
    twofour.save_file({"w": weight, "h": half}, tmp_path / "t.safetensors")
    arrays = twofour.load_file(tmp_path / "t.safetensors", framework="numpy")
    assert isinstance(arrays["w"], twofour.Compressed)
    assert np.array_equal(arrays["w"].to_dense(), weight.to_dense().numpy())
    twofour.save_file(arrays, tmp_path / "n.safetensors", dtypes={"h": "bfloat16"})
    again = twofour.load_file(tmp_path / "n.safetensors")
    assert torch.equal(again["w"].to_dense(), weight.to_dense()) and torch.equal(again["h"], half)


def test_scales_are_kept(tmp_path):
    values = twofour.prune(np.random.default_rng(0).integers(-128, 128, (6, 16)).astype(np.int8))
    weight = twofour.compress(values)
    scaled = twofour.Compressed(weight.values, weight.meta, weight.shape, weight.dtype, np.arange(6, dtype=np.float32))
    twofour.save_file({"w": scaled}, tmp_path / "w.safetensors")
    loaded = twofour.load_file(tmp_path / "w.safetensors", framework="numpy")["w"]
    assert np.array_equal(loaded.scales, np.arange(6)) and np.array_equal(loaded.to_dense(), values)
    half = twofour.compress(values.astype(np.float16))
    with pytest.raises(TypeError, match="`h`.*scales"):
        wrong = twofour.Compressed(half.values, half.meta, half.shape, half.dtype, np.ones(6, np.float32))
        twofour.save_file({"h": wrong}, tmp_path / "h.safetensors")


def test_dense_matrices_are_compressed_when_asked(tmp_path):
    path = tmp_path / "w.safetensors"
    tensors = {"a.weight": twofour.prune(torch.randn(8, 16)), "b.weight": torch.randn(8, 16), "a.bias": torch.randn(8)}
    twofour.save_file(tensors, path, compress="a.*t")
    loaded = twofour.load_file(path)
    assert isinstance(loaded["a.weight"], SparseSemiStructuredTensor) and torch.equal(
        loaded["b.weight"], tensors["b.weight"]
    )
    tensors["b.weight"] = tensors["a.weight"].clone()
    tensors["b.weight"][3, 4:8] = 1
    with pytest.raises(ValueError, match="tensor `b.weight`: row 3, group 1: 4 non-zeros"):
        twofour.save_file(tensors, path, compress=["*.weight"], overwrite=True)
    with pytest.raises(ValueError, match="no tensor is named `c.weight`"):
        twofour.save_file(tensors, path, compress=["c.weight"], overwrite=True)
    with pytest.raises(ValueError, match=r"shape is \[8\]"):
        twofour.save_file(tensors, path, compress=["a.bias"], overwrite=True)
    # The old file is as it was, and nothing lies beside it.
    assert torch.equal(twofour.load_file(path)["b.weight"], loaded["b.weight"]) and os.listdir(tmp_path) == [
        "w.safetensors"
    ]


def test_a_module_comes_back(tmp_path, device):
    path = tmp_path / "net.safetensors"
    net = sparse_net(device)
    twofour.save_file(net, path)
    tokens = torch.arange(10, device=device)
    expected = net(tokens)
    with safetensors.safe_open(path, "pt") as file:
        assert {"up.weight.values", "down.weight.meta", "up.bias", "embed.weight"} < set(file.keys())
    dense = Net().to(device)
    assert twofour.load_model(dense, path).missing_keys == []
    assert isinstance(dense.up.weight, SparseSemiStructuredTensor) and isinstance(dense.up, nn.Linear)
    torch.testing.assert_close(dense(tokens), expected)
    other = sparse_net(device)
    twofour.load_model(other, path)
    assert torch.equal(other(tokens), expected)
    # Types are the module's.
    half = Net().to(device, torch.bfloat16)
    twofour.load_model(half, path)
    assert half.up.weight.dtype == half.embed.weight.dtype == torch.bfloat16


def test_modules_and_files_that_do_not_fit(tmp_path):
    path = tmp_path / "net.safetensors"
    twofour.save_file(sparse_net(), path)
    net = Net()
    net.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="missing in the file: extra.weight, extra.bias; not in the module: nothing"):
        twofour.load_model(net, path)
    assert set(twofour.load_model(net, path, strict=False).missing_keys) == {"extra.weight", "extra.bias"}
    net = Net()
    del net.down
    with pytest.raises(RuntimeError, match="not in the module: down.weight"):
        twofour.load_model(net, path)
    net = Net()
    net.up = nn.Linear(20, 71)
    with pytest.raises(RuntimeError, match=r"`up.weight`: the file's shape is \[70, 20\], the module's \[71, 20\]"):
        twofour.load_model(net, path)
    twofour.save_file({"up.weight": twofour.compress(torch.zeros(70, 20, dtype=torch.int8))}, path, overwrite=True)
    with pytest.raises(TypeError, match="`up.weight`: no kernel multiplies int8"):
        twofour.load_model(Net(), path)


def test_refusals(tmp_path):
    path = tmp_path / "w.safetensors"
    twofour.save_file({"w": np.zeros((2, 4), np.float32)}, path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        twofour.save_file({"w": np.zeros((2, 4), np.float32)}, path)
    for entry, error in [("text", TypeError), (np.array("text"), TypeError), (np.zeros(2, object), TypeError)]:
        with pytest.raises(error, match="tensor `x`"):
            twofour.save_file({"w": np.zeros(2), "x": entry}, path, overwrite=True)
    with pytest.raises(TypeError, match="requires an nn.Module or a mapping"):
        twofour.save_file([1], path)
    with pytest.raises(ValueError, match="both compressed and dense|two tensors would be named"):
        weight = twofour.compress(np.zeros((2, 4), np.float32))
        twofour.save_file({"w": weight, "w.values": np.zeros(3)}, path, overwrite=True)
    with pytest.raises(FileNotFoundError):
        twofour.load_file(tmp_path / "none.safetensors")
    with pytest.raises(OSError):
        twofour.save_file({}, tmp_path / "none" / "w.safetensors")
    with pytest.raises(ValueError, match="framework 'jax'"):
        twofour.load_file(path, framework="jax")
    (tmp_path / "damaged").write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="damaged"):
        twofour.load_file(tmp_path / "damaged")
    assert sorted(os.listdir(tmp_path)) == ["damaged", "w.safetensors"]


def test_a_failure_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "w.safetensors"
    good = twofour.compress(twofour.prune(np.ones((4, 16), np.float32)))
    twofour.save_file({"w": good}, path)
    before = path.read_bytes()
    bad = twofour.Compressed(good.values, np.zeros_like(good.meta), good.shape, good.dtype)
    with pytest.raises(ValueError, match="`b`: row 0, group 0: metadata code 0x0"):
        twofour.save_file({"a": good, "b": bad}, path, overwrite=True)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["w.safetensors"]


@needs_command
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_command_reads_what_python_wrote(tmp_path, dtype):
    tensors = {"a.weight": sparse(40, 70, dtype), "b": torch.randn(5).to(dtype)}
    twofour.save_file(tensors, tmp_path / "small.safetensors")
    command("decompress", tmp_path / "small.safetensors", "-o", tmp_path / "dense.safetensors")
    dense = safetensors.torch.load_file(tmp_path / "dense.safetensors")
    assert torch.equal(dense["a.weight"], tensors["a.weight"].to_dense()) and torch.equal(dense["b"], tensors["b"])
    # Both writers write the same bytes.
    command("compress", tmp_path / "dense.safetensors", "-o", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "small.safetensors").read_bytes()


@needs_command
@pytest.mark.parametrize("dtype", FLOATS)
def test_python_reads_what_the_command_wrote(tmp_path, dtype):
    net = Net().to(dtype)
    safetensors.torch.save_file(net.state_dict(), tmp_path / "net.safetensors")
    command("prune", tmp_path / "net.safetensors", "-o", tmp_path / "pruned.safetensors")
    command("compress", tmp_path / "pruned.safetensors", "-o", tmp_path / "small.safetensors")
    loaded = twofour.load_file(tmp_path / "small.safetensors")
    assert isinstance(loaded["up.weight"], SparseSemiStructuredTensor)
    assert torch.equal(loaded["up.weight"].to_dense(), twofour.prune(net.up.weight))
    assert torch.equal(loaded["up.bias"], net.up.bias)


@pytest.mark.parametrize("group_size", [128, 64])
def test_scales_for_groups_of_int8_are_kept(tmp_path, group_size):
    integers = twofour.compress(twofour.prune(torch.randint(-127, 128, (5, 150), dtype=torch.int8)))
    scales = torch.rand(5, -(-150 // group_size)).half()
    weight = twofour.Compressed(integers.values, integers.meta, integers.shape, "int8", scales, group_size)
    expected = integers.to_dense().float() * scales.float().repeat_interleave(group_size, 1)[:, :150]
    twofour.save_file({"w": weight}, tmp_path / "w.safetensors")
    for framework in ("torch", "numpy"):
        loaded = twofour.load_file(tmp_path / "w.safetensors", framework=framework)["w"]
        assert (loaded.dtype, loaded.group_size) == ("int8", group_size)
        assert np.array_equal(np.asarray(loaded.scales), scales.numpy()) and np.array_equal(
            np.asarray(loaded.to_dense()), expected.numpy()
        )
        twofour.save_file({"w": loaded}, tmp_path / "again.safetensors", overwrite=True)
        read = [twofour.load_file(tmp_path / f"{name}.safetensors")["w"] for name in ("w", "again")]
        assert all(torch.equal(getattr(read[0], part), getattr(read[1], part)) for part in ("values", "meta", "scales"))
    scales[3, 1] = float("nan")
    with pytest.raises(ValueError, match="`w`.*row 3"):
        twofour.save_file({"w": weight}, tmp_path / "w.safetensors", overwrite=True)


def test_layers_of_int8_come_back(tmp_path):
    path = tmp_path / "m.safetensors"
    layer = twofour.quantization.QuantizedLinear.from_dense(nn.Linear(70, 7), prune=True)
    twofour.save_file(nn.Sequential(layer), path)
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == {"0.weight.values", "0.weight.meta", "0.weight.scales", "0.bias"}
    other, x = (
        nn.Sequential(twofour.quantization.QuantizedLinear.from_dense(nn.Linear(70, 7), prune=True)),
        torch.randn(3, 70),
    )
    twofour.load_model(other, path)
    assert torch.equal(other[0](x), layer(x))
    weight = twofour.load_file(path)["0.weight"]
    assert torch.equal(twofour.quantization.QuantizedLinear.from_compressed(weight, layer.bias)(x), layer(x))
    with pytest.raises(TypeError, match="`0.weight`: an int8 weight goes into a QuantizedLinear"):
        twofour.load_model(nn.Sequential(nn.Linear(70, 7)), path)


@pytest.fixture(params=[128, -1])
def int4(request):
    """An int4 layer of an odd shape."""
    return twofour.Int4Linear.from_dense(nn.Linear(270, 7), request.param, prune=True)


def test_int4_weights_are_kept(tmp_path, int4):
    path = tmp_path / "m.safetensors"
    twofour.save_file(nn.Sequential(int4, nn.LayerNorm(7)), path)
    with safetensors.safe_open(path, "pt") as file:
        entry = json.loads(file.metadata()["twofour"])["weights"]["0.weight"]
        assert {"0.weight.values", "0.weight.meta", "0.weight.scales", "0.bias", "1.weight"} <= set(file.keys())
    expected = {"shape": [7, 270], "dtype": "I4", "pattern": "2:4"} | (
        {"group_size": 128} if int4.group_size == 128 else {}
    )
    assert entry == expected
    loaded = twofour.load_file(path)
    weight = loaded["0.weight"]
    assert (weight.dtype, weight.shape, weight.group_size) == ("int4", (7, 270), int4.group_size)
    assert torch.equal(weight.to_dense(), int4.to_dense())
    again = twofour.Int4Linear.from_compressed(weight, loaded["0.bias"])
    x = torch.randn(3, 270)
    assert torch.equal(again(x), int4(x))
    # Into a model, and from the parts.
    model = nn.Sequential(
        twofour.Int4Linear.from_dense(nn.Linear(270, 7), int4.group_size, prune=True), nn.LayerNorm(7)
    )
    twofour.load_model(model, path)
    assert torch.equal(model[0](x), int4(x))
    twofour.save_file({"w": weight}, tmp_path / "w.safetensors")
    arrays = twofour.load_file(tmp_path / "w.safetensors", framework="numpy")["w"]
    assert np.array_equal(arrays.to_dense(), int4.to_dense().numpy()) and arrays.scales.dtype == np.float16
    twofour.save_file({"w": arrays}, tmp_path / "w.safetensors", overwrite=True)
    assert torch.equal(twofour.load_file(tmp_path / "w.safetensors")["w"].scales, weight.scales)


def test_int4_weights_that_fit_nowhere_are_named(tmp_path, int4):
    path = tmp_path / "m.safetensors"
    twofour.save_file(nn.Sequential(int4), path)
    with pytest.raises(TypeError, match="`0.weight`: an int4 weight goes into an Int4Linear"):
        twofour.load_model(nn.Sequential(nn.Linear(270, 7)), path)
    for other in (
        twofour.Int4Linear.from_dense(nn.Linear(264, 7), int4.group_size, prune=True),
        twofour.Int4Linear.from_dense(nn.Linear(270, 7), 127 - int4.group_size, prune=True),
    ):
        with pytest.raises(RuntimeError, match="`0.weight`: shape and group size"):
            twofour.load_model(nn.Sequential(other), path)
    weight = twofour.load_file(path)["0.weight"]
    with pytest.raises(TypeError, match="an int4 weight of tensors is required"):
        twofour.Int4Linear.from_compressed(twofour.load_file(path, framework="numpy")["0.weight"])
    weight.scales[1, 0] = float("inf")
    for call in (lambda: twofour.save_file({"w": weight}, tmp_path / "w"), weight.to_dense):
        with pytest.raises(ValueError, match="row 1"):
            call()
    assert not (tmp_path / "w").exists()


@needs_command
def test_the_command_reads_int4_weights(tmp_path, int4):
    path = tmp_path / "m.safetensors"
    twofour.save_file(nn.Sequential(int4), path)
    assert "I4" in command("inspect", path)
    command("check", path)
    command("decompress", path, "-o", tmp_path / "dense.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "dense.safetensors")["0.weight"], int4.to_dense())
