"""Models with sparse weights become dense ones, for exporters."""

import io

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import twofour  # noqa: E402
from twofour.quantization import SemiSparseLayout, int8_dynamic_activation_int8_weight, quantize_  # noqa: E402
from twofour.sparsity import block_sparse_weight, semi_sparse_weight, sparsify_  # noqa: E402
from twofour.sparsity.training import SemiSparseConv2d, SemiSparseLinear  # noqa: E402


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.first = nn.Linear(8, 64)
        self.second = nn.Linear(64, 64, bias=False)
        self.tied = self.first

    def forward(self, x):
        x = self.conv(x).mean((-2, -1))
        return self.second(torch.nn.functional.gelu(self.tied(x)))


def changed(kind):
    model = Model().eval()
    if kind == "layers":
        model.conv = twofour.Conv2d.from_dense(model.conv, prune=True)
        model.first = model.tied = twofour.Linear.from_dense(model.first, prune=True)
        model.second = twofour.Linear.from_dense(model.second, prune=True)
    elif kind == "training":
        model.conv = SemiSparseConv2d.from_dense(model.conv)
        model.first = model.tied = SemiSparseLinear.from_dense(model.first)
    elif kind == "tensors":
        sparsify_(model, semi_sparse_weight(), filter_fn=lambda m, _: isinstance(m, nn.Linear), prune=True)
    elif kind == "blocks":
        with torch.no_grad():
            model.second.weight[:, :32] = 0
        sparsify_(model, block_sparse_weight(blocksize=32), filter_fn=lambda m, _: m is model.second)
    elif kind == "int4":
        model.first = model.tied = twofour.Int4Linear.from_dense(model.first, prune=True)
    elif kind == "int8":
        quantize_(model, int8_dynamic_activation_int8_weight(layout=SemiSparseLayout(), prune=True),
                  filter_fn=lambda m, _: m is model.second)  # fmt: skip
    return model


@pytest.mark.parametrize(
    ("kind", "count"), [("layers", 3), ("training", 2), ("tensors", 2), ("blocks", 1), ("int4", 1), ("int8", 1), ("", 0)]
)
def test_the_dense_model_computes_the_same_with_torch_alone(kind, count):
    model, x = changed(kind), torch.randn(3, 4, 6, 6)
    with torch.no_grad():
        expected = model(x)
        assert twofour.to_dense(model) == count
        found = model(x)
    # int8 layers round activations, too.
    tolerance = 2e-2 if kind == "int8" else 1e-4
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert all(type(m) in (Model, nn.Linear, nn.Conv2d) for m in model.modules()) and model.tied is model.first
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("kind", ["layers", "tensors"])
@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx_takes_the_dense_model(kind, dynamo):
    onnx = pytest.importorskip("onnx")
    if dynamo:
        pytest.importorskip("onnxscript")
    model, x = changed(kind), torch.randn(1, 4, 6, 6)
    twofour.to_dense(model)
    file = io.BytesIO()
    torch.onnx.export(model, (x,), file, dynamo=dynamo)
    assert {"Gemm", "MatMul"} & {node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node}


@pytest.mark.parametrize("kind", ["layers", "tensors", "training", "int4", "int8"])
def test_torch_export_saves_and_loads_sparse_models(kind):
    model, x = changed(kind), torch.randn(3, 4, 6, 6)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for given in (x, torch.randn(5, 4, 6, 6)):
        torch.testing.assert_close(again(given), model(given))


def integers(dense):
    model = nn.Sequential(dense)
    quantize_(model, int8_dynamic_activation_int8_weight(layout=SemiSparseLayout(), prune=True))
    return model[0]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "made",
    [twofour.Linear.from_dense, twofour.Int4Linear.from_dense, twofour.Conv1d.from_dense, SemiSparseLinear.from_dense,
     integers],
)  # fmt: skip
def test_torch_export_takes_a_layer_alone(made, strict):
    dense = nn.Conv1d(64, 32, 3) if made == twofour.Conv1d.from_dense else nn.Linear(64, 128)
    prune = {} if made in (integers, SemiSparseLinear.from_dense) else {"prune": True}
    layer, x = made(dense, **prune).eval(), torch.randn(3, 64, *([9] if isinstance(dense, nn.Conv1d) else []))
    exported = torch.export.export(layer, (x,), strict=strict)
    assert torch.equal(exported.module()(x), layer(x))


@pytest.mark.parametrize("kind", ["layers", "tensors", "training", "int4"])
def test_function_transforms_are_those_of_the_dense_model(kind):
    model, dense, x = changed(kind), changed(kind), torch.randn(3, 4, 6, 6)
    twofour.to_dense(dense)
    tangent = torch.randn_like(x)
    for transform in (
        lambda m: torch.func.jvp(m, (x,), (tangent,))[1],
        lambda m: torch.func.vjp(m, x)[1](torch.ones(3, 64))[0],
        lambda m: torch.func.vmap(m)(torch.stack((x, tangent))),
        lambda m: torch.func.jacrev(m)(x[0]),
        lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
    ):
        torch.testing.assert_close(transform(model), transform(dense), atol=1e-4, rtol=1e-4)


def test_a_layer_that_is_the_model_is_refused():
    with pytest.raises(ValueError, match="the model itself is a Linear"):
        twofour.to_dense(twofour.Linear.from_dense(nn.Linear(8, 8), prune=True))
