"""Modules that read the weights of layers and multiply with them themselves: torch's encoder layers and attention, and
others."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import twofour
from twofour.pretrain import SparseLinear, SparseLinearTranspose, STEPLinear
from twofour.quantization import Int4Linear, QuantizedLinear
from twofour.sparsity import semi_sparse_weight, sparsify_
from twofour.sparsity.training import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)

WIDTH, HEADS = 32, 4


def sparse_weight(linear):
    sparsify_(nn.Sequential(linear), semi_sparse_weight(), prune=True)
    return linear


def of_pretraining(cls, **options):
    def make(linear):
        layer = cls(linear.in_features, linear.out_features, **options)
        layer.load_state_dict(linear.state_dict(), strict=False)
        return layer

    return make


def semi_sparse(linear):
    return SemiSparseLinear.from_dense(linear, algo="largest_abs_values_greedy")


TRAINING = {
    "SemiSparseLinear": semi_sparse,
    "SparseLinear": of_pretraining(SparseLinear, weight_gradient="dense"),
    "SparseLinearTranspose": of_pretraining(SparseLinearTranspose, weight_gradient="dense"),
    "STEPLinear": of_pretraining(STEPLinear),
}
LAYERS = {
    **TRAINING,
    "Linear": lambda linear: twofour.Linear.from_dense(linear, prune=True),
    "sparsify_": sparse_weight,
    "int4": lambda linear: Int4Linear.from_dense(linear, prune=True),
    "int8": lambda linear: QuantizedLinear.from_dense(linear, prune=True),
}


def weight_of(layer):
    if isinstance(layer, (twofour.Linear, Int4Linear, QuantizedLinear)):
        weight = layer.to_dense()
        return (weight.weight if isinstance(weight, nn.Linear) else weight).detach()
    return layer.weight.to_dense() if hasattr(layer.weight, "packed_weight") else layer.dense_weight()


def dense(layer):
    linear = nn.Linear(layer.in_features, layer.out_features)
    linear.weight = nn.Parameter(weight_of(layer))
    linear.bias = nn.Parameter(layer.bias.detach().clone())
    return linear


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, **options)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_attention_multiplies_with_the_sparse_weight(name, grad):
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    attention.out_proj = LAYERS[name](attention.out_proj)
    reference = copy.deepcopy(attention)
    attention.eval()
    reference.out_proj = dense(attention.out_proj)
    x = torch.randn(2, 5, WIDTH)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for training in (False, True):
        for arguments in ({}, {"need_weights": False}, {"key_padding_mask": mask}):
            with torch.set_grad_enabled(grad):
                found, expected = (m.train(training)(x, x, x, **arguments)[0] for m in (attention, reference))
            if name == "STEPLinear" and training:
                continue  # Dense until its optimizer switches.
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("layers", [1, 2])
def test_encoders_compute_the_same_in_evaluation_and_in_training(name, layers):
    encoder = nn.TransformerEncoder(encoder_layer(), layers)
    last = encoder.layers[-1]
    last.linear1, last.linear2 = LAYERS[name](last.linear1), LAYERS[name](last.linear2)
    reference = copy.deepcopy(encoder)
    reference.layers[-1].linear1, reference.layers[-1].linear2 = dense(last.linear1), dense(last.linear2)
    x = torch.randn(2, 5, WIDTH)
    tolerance = {"rtol": 0.05, "atol": 0.05} if name == "int8" else {"rtol": 1e-4, "atol": 1e-5}
    with torch.no_grad():
        expected = reference.eval()(x)
        torch.testing.assert_close(encoder.eval()(x), expected, **tolerance)
        if name != "STEPLinear":
            torch.testing.assert_close(encoder.train()(x), expected, **tolerance)


@pytest.mark.parametrize("name", TRAINING)
def test_a_padded_batch_is_that_of_the_dense_encoder(name):
    encoder = nn.TransformerEncoder(encoder_layer(), 2)
    for layer in encoder.layers:
        layer.linear1, layer.self_attn.out_proj = (
            TRAINING[name](layer.linear1),
            TRAINING[name](layer.self_attn.out_proj),
        )
    reference = copy.deepcopy(encoder)
    for layer, other in zip(encoder.layers, reference.layers, strict=True):
        other.linear1, other.self_attn.out_proj = dense(layer.linear1), dense(layer.self_attn.out_proj)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        x = torch.randn(2, 5, WIDTH)
        found, expected = (m.eval()(x, src_key_padding_mask=mask) for m in (encoder, reference))
    torch.testing.assert_close(found[~mask], expected[~mask], rtol=1e-4, atol=1e-5)


def replace_last(encoder, name):
    """Replaces the layers of the last encoder layer; returns a dense encoder that computes the same."""
    reference, paths = copy.deepcopy(encoder), ("layers.1.linear1", "layers.1.linear2", "layers.1.self_attn.out_proj")
    if name == "sparsify_":
        sparsify_(encoder, semi_sparse_weight(), lambda _, path: path in paths, prune=True)
    for path in paths:
        layer = encoder.get_submodule(path)
        if name != "sparsify_":
            layer = LAYERS[name](layer)
            encoder.set_submodule(path, layer)
        reference.set_submodule(path, dense(layer))
    return reference.eval()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoders_take_padded_and_nested_batches_where_later_layers_are_sparse(name, is_nested):
    encoder = nn.TransformerEncoder(encoder_layer(), 2).eval()
    reference = replace_last(encoder, name)
    encoder.eval()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = torch.randn(2, 5, WIDTH)
    tolerance = {"rtol": 0.05, "atol": 0.05} if name == "int8" else {"rtol": 1e-4, "atol": 1e-5}
    with torch.no_grad():
        if not is_nested:
            found, expected = (m(x, src_key_padding_mask=mask)[~mask] for m in (encoder, reference))
            torch.testing.assert_close(found, expected, **tolerance)
            return
        batch = torch.nested.nested_tensor([x[0], x[1, :3]])
        if name == "sparsify_":
            with pytest.raises(AssertionError, match="does not support NestedTensor"):
                encoder(batch)
            return
        for found, expected in zip(encoder(batch).unbind(), reference(batch).unbind(), strict=True):
            torch.testing.assert_close(found, expected, **tolerance)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, 16)

    def forward(self, x):
        return F.linear(x, self.proj.weight, self.proj.bias) + self.helper(x)

    def helper(self, x):
        return (self.proj.weight @ x.mT).mT


@pytest.mark.parametrize("name", ["SemiSparseLinear", "SparseLinear", "SparseLinearTranspose"])
def test_readers_of_a_weight_train_it_as_the_layer_does(name):
    reader = Reader()
    reader.proj = TRAINING[name](reader.proj)
    x = torch.randn(6, WIDTH)
    expected = 2 * F.linear(x, weight_of(reader.proj), reader.proj.bias.detach()) - reader.proj.bias.detach()
    y = reader(x)
    torch.testing.assert_close(y.detach(), expected, rtol=1e-4, atol=1e-5)
    y.sum().backward()
    torch.testing.assert_close(reader.proj.weight.grad, 2 * x.sum(0).expand(16, WIDTH))
    # Elsewhere it is the parameter.
    assert reader.proj.weight is reader.proj._parameters["weight"] is dict(reader.named_parameters())["proj.weight"]


@pytest.mark.parametrize("name", ["SemiSparseLinear", "SparseLinear", "SparseLinearTranspose"])
def test_what_torch_func_calls_in_a_forward_reads_the_sparse_weight(name):
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = TRAINING[name](nn.Linear(WIDTH, 16))

        def forward(self, x):
            return torch.vmap(lambda row: F.linear(row, self.proj.weight, self.proj.bias))(x)

    mapped, x = Mapped(), torch.randn(6, WIDTH)
    expected = F.linear(x, weight_of(mapped.proj), mapped.proj.bias)
    torch.testing.assert_close(mapped(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_decoder_layers_compute_the_same_in_evaluation_and_in_training(name, grad):
    decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
    reference = copy.deepcopy(decoder)
    for path in ("linear1", "linear2", "self_attn.out_proj", "multihead_attn.out_proj"):
        layer = LAYERS[name](decoder.get_submodule(path))
        decoder.set_submodule(path, layer)
        reference.set_submodule(path, dense(layer))
    x, memory = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    tolerance = {"rtol": 0.05, "atol": 0.05} if name == "int8" else {"rtol": 1e-4, "atol": 1e-5}
    for training in (False, True):
        if name == "STEPLinear" and training:
            continue  # Dense until its optimizer switches.
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(
                decoder.train(training)(x, memory), reference.train(training)(x, memory), **tolerance
            )


def product(layer, x):
    """What a function of a model does with a layer that it is given."""
    return F.linear(x, layer.weight, layer.bias)


class Attention(nn.Module):
    """Attention by torch's function, with projections of its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        bias = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        weights = {"q_proj_weight": self.q.weight, "k_proj_weight": self.k.weight, "v_proj_weight": self.v.weight}
        attended, _ = F.multi_head_attention_forward(
            *(x, x, x, WIDTH, HEADS, None, bias, None, None, False, 0.0, self.out.weight, self.out.bias),
            use_separate_proj_weight=True,
            **weights,
        )
        return product(self.out, attended)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_functions_that_a_model_gives_layers_or_their_weights_multiply_with_the_sparse_weight(name, grad):
    attention = Attention()
    for path in ("q", "k", "v", "out"):
        attention.set_submodule(path, LAYERS[name](attention.get_submodule(path)))
    reference = copy.deepcopy(attention)
    for path in ("q", "k", "v", "out"):
        reference.set_submodule(path, dense(attention.get_submodule(path)))
    attention, reference, x = attention.eval(), reference.eval(), torch.randn(5, 2, WIDTH)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(attention(x), reference(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TRAINING)
def test_hooks_optimizers_and_programs_read_the_parameter(name):
    model, seen = nn.Sequential(TRAINING[name](nn.Linear(WIDTH, 16))), []
    model[0].register_forward_pre_hook(lambda layer, args: seen.append(layer.weight))
    model[0].register_forward_hook(lambda layer, args, y: seen.append(layer.weight))
    model(torch.randn(2, WIDTH))
    assert len(seen) == 2 and all(weight is model[0]._parameters["weight"] for weight in [*seen, model[0].weight])


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", TRAINING)
def test_a_parametrized_layer_prunes_what_the_parametrization_computes(name):
    layer = TRAINING[name](nn.Linear(WIDTH, 16)).eval()
    x = torch.randn(3, WIDTH)
    expected = 2 * (layer(x) - layer.bias) + layer.bias
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    layer(x).sum().backward()
    assert layer.parametrizations.weight.original.grad.count_nonzero() > 0
    for convert in (swap_semi_sparse_linear_with_linear, lambda m: sparsify_(m, semi_sparse_weight())):
        with pytest.raises(ValueError, match=r"'0': .*remove_parametrizations"):
            convert(nn.Sequential(layer))


@pytest.mark.parametrize("name", ["Linear", "int4", "int8"])
def test_a_packed_weight_is_not_tied(name):
    layer, other = LAYERS[name](nn.Linear(WIDTH, 16)), nn.Linear(WIDTH, 16)
    with pytest.raises(TypeError, match=r"is packed and is no parameter, so it cannot be tied or set"):
        layer.weight = other.weight
    with pytest.raises((TypeError, ValueError)):
        other.weight = layer.weight
    with pytest.raises(ValueError, match="does not have a parameter"):
        nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())


def test_what_cannot_be_served_is_refused():
    attention = nn.MultiheadAttention(WIDTH, HEADS)
    with pytest.raises(ValueError, match="out_proj"):
        swap_linear_with_semi_sparse_linear(attention, {"out_proj": SemiSparseActivationLinear})
    reader = Reader()
    swap_linear_with_semi_sparse_linear(reader, {"proj": SemiSparseActivationLinear})
    with pytest.raises(NotImplementedError, match="prunes its input"):
        reader(torch.randn(4, WIDTH))


def test_an_encoder_layer_calls_a_layer_that_prunes_its_input():
    layer = encoder_layer()
    swap_linear_with_semi_sparse_linear(layer, {"linear2": SemiSparseActivationLinear})
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), layer.train()(x))


def test_compiled_readers_read_what_eager_ones_do():
    reader, attention = Reader(), nn.MultiheadAttention(WIDTH, HEADS)
    reader.proj, attention.out_proj = semi_sparse(reader.proj), semi_sparse(attention.out_proj)
    x = torch.randn(6, WIDTH)
    torch.testing.assert_close(torch.compile(reader, backend="aot_eager")(x), reader(x))
    found, expected = (m(x, x, x)[0] for m in (torch.compile(attention, backend="aot_eager"), attention))
    torch.testing.assert_close(found, expected)


class Interrupted(nn.Module):
    """Reads a weight behind what torch.compile leaves to Python, and by a function that is compiled by itself."""

    def __init__(self, layer):
        super().__init__()
        self.proj, self.product = layer, torch.compile(product, backend="aot_eager")

    def forward(self, x):
        y = self.product(self.proj, x)
        torch._dynamo.graph_break()
        return y + product(self.proj, x)


@pytest.mark.parametrize("name", TRAINING)
def test_compiled_functions_write_to_the_parameter_and_forward_passes_read_what_is_kept(name):
    layer, x = TRAINING[name](nn.Linear(WIDTH, 16)).eval(), torch.randn(3, WIDTH)
    before = layer.master.detach().clone()

    @torch.compile(backend="aot_eager")
    def negate(layer):
        with torch.no_grad():
            layer.weight.mul_(-1)
        return layer.weight.sum()

    assert torch.equal(negate(layer), layer.master.sum()) and torch.equal(layer.master, -before)
    model = Interrupted(layer).eval()
    for found in (model(x), torch.compile(model, backend="aot_eager")(x)):
        torch.testing.assert_close(found, 2 * layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inside_first", [False, True])
def test_a_compiled_function_reads_what_its_caller_reads(inside_first):
    model, x = Interrupted(semi_sparse(nn.Linear(WIDTH, 16))).eval(), torch.randn(3, WIDTH)
    layer = model.proj
    kept, dense = layer(x), F.linear(x, layer.master, layer.bias)
    for inside in (inside_first, not inside_first, inside_first):
        if inside:
            torch.testing.assert_close(model(x), 2 * kept, rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(model.product(layer, x), dense, rtol=1e-4, atol=1e-5)


class Calling(nn.Module):
    """Calls a function that is compiled by itself."""

    def forward(self, function, layer):
        return function(layer)


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_compiled_functions_read_the_weight_of_integers_and_cannot_write_to_it(name):
    layer, x = LAYERS[name](nn.Linear(WIDTH, 16)), torch.randn(3, WIDTH)
    torch.testing.assert_close(torch.compile(product, backend="aot_eager")(layer, x), product(layer, x))

    @torch.compile(backend="aot_eager")
    def negate(layer):
        with torch.no_grad():
            layer.weight.mul_(-1)

    # Also where it was compiled for a forward pass.
    for inside in (lambda: Calling()(negate, layer), lambda: negate(layer)):
        with pytest.raises(NotImplementedError, match="which writing would not change"):
            inside()


@pytest.mark.parametrize("width", [None, 59, 63, 65])
@pytest.mark.parametrize("name", LAYERS)
def test_inputs_of_another_width_are_errors(name, width):
    layer = LAYERS[name](nn.Linear(64, 16))
    with pytest.raises(RuntimeError):
        layer(torch.ones(()) if width is None else torch.ones(2, width))
    assert layer(torch.ones(64)).shape == (16,) and layer(torch.ones(0, 64)).shape == (0, 16)
