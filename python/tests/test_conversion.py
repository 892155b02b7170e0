"""Converting linear layers: what was trained is what is deployed, and nothing that a layer has is lost in silence."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import twofour
from twofour import pretrain
from twofour.quantization import Int4Linear, QuantizedLinear, int4_weight_only, int8_dynamic_activation_int8_weight
from twofour.sparse import SparseSemiStructuredTensor
from twofour.sparsity import apply_fake_sparsity, block_sparse_weight, semi_sparse_weight, sparsify_
from twofour.sparsity.training import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)

ALGORITHMS = ["largest_values_greedy", "largest_abs_values_greedy", "causal1122", "optimal"]


def semi_sparse(algo):
    return lambda cols, rows: SemiSparseLinear(cols, rows, algo=algo)


#: Training layers that prune their weight, by name.
TRAINED = {algo: semi_sparse(algo) for algo in ALGORITHMS} | {
    "S-STE": pretrain.SparseLinear,
    "FST": lambda cols, rows: pretrain.SparseLinearTranspose(cols, rows, freq=2),
    "STEP": pretrain.STEPLinear,
}


def trained(name, steps=5):
    """A model of two training layers after some steps of an optimizer."""
    model = nn.Sequential(TRAINED[name](32, 48), nn.GELU(), TRAINED[name](48, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
    return model.eval()


def swapped_back(model):
    swap_semi_sparse_linear_with_linear(model)
    return model


def by_layers(model):
    for name in ("0", "2"):
        model.set_submodule(name, twofour.Linear.from_dense(model.get_submodule(name)))
    return model


#: Ways from trained layers to layers that compute the same, in the numbers of floats.
ROADS = {
    "swap back": swapped_back,
    "swap back, sparsify_": lambda model: sparsify_(swapped_back(model), semi_sparse_weight()),
    "swap back, sparsify_ with prune": lambda model: sparsify_(swapped_back(model), semi_sparse_weight(), prune=True),
    "sparsify_": lambda model: sparsify_(model, semi_sparse_weight()),
    "sparsify_ with another rule": lambda model: sparsify_(model, semi_sparse_weight(), prune="optimal"),
    "in blocks": lambda model: sparsify_(model, block_sparse_weight(16)),
    "twofour.Linear": by_layers,
    "sparsify_, twofour.Linear": lambda model: by_layers(sparsify_(model, semi_sparse_weight())),
    "swap back, fake sparsity": lambda model: apply_fake_sparsity(swapped_back(model)),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", TRAINED)
def test_what_was_trained_is_what_is_deployed(name, road):
    model = trained(name)
    x = torch.randn(64, 32)
    with torch.no_grad():
        expected = model(x)
        masks = [layer.dense_weight() != 0 for layer in (model[0], model[2])]
        deployed = ROADS[road](model)
        torch.testing.assert_close(deployed(x), expected, rtol=1e-4, atol=1e-5)
    for layer, mask in zip((deployed[0], deployed[2]), masks, strict=True):
        weight = layer.weight.to_dense() if hasattr(layer.weight, "to_dense") else layer.weight
        assert torch.equal(weight.detach() != 0, mask) and twofour.verify(weight.detach())


@pytest.mark.parametrize(
    "config",
    [int8_dynamic_activation_int8_weight(), int8_dynamic_activation_int8_weight(prune=True), int4_weight_only()],
)
@pytest.mark.parametrize("name", TRAINED)
def test_quantized_layers_keep_the_trained_mask(name, config):
    model = trained(name)
    weights = [layer.dense_weight() for layer in (model[0], model[2])]
    twofour.quantize_(model, config)
    for layer, weight in zip((model[0], model[2]), weights, strict=True):
        found = layer.to_dense()
        assert not found[weight == 0].any()
        assert (found - weight).abs().max() <= weight.abs().max() / 7


def test_swapping_back_keeps_parameters_and_leaves_state_dicts_alone():
    model = trained("largest_values_greedy")
    master, parameters = model.state_dict(), list(model.parameters())
    before = {name: value.clone() for name, value in master.items()}
    swap_semi_sparse_linear_with_linear(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(master[name], value) for name, value in before.items())
    # The way to go on with the dense master weights.
    model.load_state_dict(master)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_to_dense_leaves_the_training_layer_as_it_is():
    for make in TRAINED.values():
        layer = make(16, 8).eval()
        before = layer.weight.detach().clone()
        dense = layer.to_dense()
        x = torch.randn(3, 16)
        assert type(dense) is nn.Linear and not dense.training and dense.weight.requires_grad
        torch.testing.assert_close(dense(x), layer(x))
        assert torch.equal(layer.weight, before)


def test_a_trained_weight_that_another_module_shares_is_not_changed():
    model = nn.ModuleDict({"embedding": nn.Embedding(32, 16), "head": SemiSparseLinear(16, 32)})
    model["head"].weight = model["embedding"].weight
    with pytest.raises(ValueError, match="'head': its weight is also 'embedding.weight'"):
        swap_semi_sparse_linear_with_linear(model)
    assert type(model["head"]) is SemiSparseLinear
    before = model["embedding"].weight.detach().clone()
    sparsify_(model, semi_sparse_weight())
    assert torch.equal(model["embedding"].weight, before) and isinstance(
        model["head"].weight, SparseSemiStructuredTensor
    )
    both = nn.ModuleList([SemiSparseLinear(16, 16), SemiSparseLinear(16, 16)])
    both[1].weight = both[0].weight
    swap_semi_sparse_linear_with_linear(both)
    assert both[1].weight is both[0].weight and twofour.verify(both[0].weight)


def test_layers_whose_sparsity_no_deployed_layer_has_are_refused_by_name():
    model = nn.Sequential(SemiSparseActivationLinear(16, 16))
    for convert in (
        lambda: sparsify_(model, semi_sparse_weight(), prune=True),
        lambda: twofour.quantize_(model, int8_dynamic_activation_int8_weight(prune=True)),
        lambda: twofour.Linear.from_dense(model[0], prune=True),
    ):
        with pytest.raises(TypeError, match="SemiSparseActivationLinear, which prunes its input"):
            convert()
    with pytest.raises(ValueError, match="'0' is a SemiSparseLinear, which prunes by its own rule"):
        apply_fake_sparsity(nn.Sequential(SemiSparseLinear(16, 16)))
    fst = pretrain.SparseLinearTranspose(16, 16)
    fst.weight.mode = "dense"
    with pytest.raises(ValueError, match="2:4 allows 2"):
        twofour.Linear.from_dense(fst)
    with pytest.raises(ValueError, match="cannot be replaced in place"):
        sparsify_(SemiSparseLinear(16, 16), semi_sparse_weight())


# Subclasses, shared modules, hooks, attributes.


def swap(model):
    swap_linear_with_semi_sparse_linear(
        model, {name: SemiSparseLinear for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    )


def to_linear(model):
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, twofour.Linear.from_dense(module, prune=True))


#: What replaces every linear layer of a model by one of another class.
DOORS = {
    "int8": lambda model: twofour.quantize_(model, int8_dynamic_activation_int8_weight(prune=True)),
    "int4": lambda model: twofour.quantize_(model, int4_weight_only(group_size=-1)),
    "swap": swap,
    "Linear": to_linear,
}


@pytest.fixture(params=DOORS)
def door(request):
    return DOORS[request.param]


def two_four(*args, **kwargs):
    return apply_fake_sparsity(nn.Linear(*args, **kwargs))


class Tripled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3


class Saving(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "more"] = torch.zeros(1)


class Mixin:
    def forward(self, x):
        return super().forward(x) + 1


class Mixed(Mixin, nn.Linear):
    pass


class Helping(nn.Linear):
    def norm(self):
        return self.weight.norm()


class Computed(nn.Linear):
    @property
    def scale(self):
        return 2


class Named(nn.Linear):
    kind = "up"

    def __init__(self, *args, init="kaiming", **kwargs):
        super().__init__(*args, **kwargs)
        self.init = init
        self.register_buffer("steps", torch.zeros(2), persistent=False)
        self.register_parameter("gain", nn.Parameter(torch.ones(3)))
        self.extra = nn.Identity()


@pytest.mark.parametrize("cls", [Tripled, Saving, Mixed, type("Derived", (Tripled,), {}), Helping, Computed])
def test_a_subclass_with_methods_of_its_own_is_refused_by_name(door, cls):
    model = nn.Sequential(apply_fake_sparsity(cls(16, 16)), nn.Linear(16, 16))
    with pytest.raises(TypeError, match=rf"it is a {cls.__name__}, whose own (forward|_save_to_state_dict|norm|scale)"):
        door(model)
    assert type(model[0]) is cls


def test_sparsify_serves_a_subclass_with_a_forward_of_its_own():
    model = nn.Sequential(Tripled(16, 16), Mixed(16, 16))
    apply_fake_sparsity(model)
    x = torch.randn(3, 16)
    expected = model(x)
    sparsify_(model, semi_sparse_weight())
    torch.testing.assert_close(model(x), expected)
    assert type(model[0]) is Tripled


def test_a_subclass_that_adds_attributes_is_served(door):
    linear = apply_fake_sparsity(Named(16, 16, init="zeros")).eval()
    model = nn.ModuleDict({"layer": linear})
    door(model)
    layer = model["layer"]
    assert type(layer) is not Named and layer.init == "zeros" and layer.kind == "up" and not layer.training
    assert layer.steps is linear.steps and layer.gain is linear.gain and isinstance(layer.extra, nn.Identity)
    assert "steps" not in layer.state_dict() and "gain" in layer.state_dict()
    if isinstance(layer, SemiSparseLinear):
        swap_semi_sparse_linear_with_linear(model)
        assert (
            type(model["layer"]) is Named
            and model["layer"].gain is linear.gain
            and model["layer"].__dict__.keys() == linear.__dict__.keys()
        )


def test_torchs_own_subclass_is_served():
    for convert in (twofour.Linear.from_dense, QuantizedLinear.from_dense, Int4Linear.from_dense):
        assert convert(apply_fake_sparsity(nn.modules.linear.NonDynamicallyQuantizableLinear(16, 8)))(
            torch.randn(2, 16)
        ).shape == (2, 8)


def test_a_module_with_two_names_is_replaced_under_both(door):
    shared = two_four(16, 16)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": nn.ModuleList([shared]), "c": two_four(16, 16)})
    if door is to_linear:
        pytest.skip("this replaces one name at a time")
    door(model)
    assert model["a"][0] is model["b"][0] and model["a"][0] is not shared
    x = torch.randn(2, 16)
    assert torch.equal(model["a"][0](x), model["b"][0](x))


def test_a_filter_may_take_either_name_of_a_module():
    shared = two_four(16, 16)
    model = nn.ModuleDict({"a": shared, "b": shared})
    twofour.quantize_(model, int8_dynamic_activation_int8_weight(), lambda module, name: name == "b")
    assert isinstance(model["a"], QuantizedLinear) and model["b"] is model["a"]


def test_hooks_are_called_and_their_handles_remove_them(door):
    model = nn.Sequential(two_four(16, 16))
    calls = []

    def note(what):
        return lambda *args, **kwargs: calls.append(what)

    layer = model[0]
    handles = [
        layer.register_forward_pre_hook(note("before")),
        layer.register_forward_pre_hook(note("before with kwargs"), with_kwargs=True),
        layer.register_forward_hook(note("after")),
        layer.register_forward_hook(note("always"), always_call=True),
        layer.register_full_backward_hook(note("gradient")),
        layer.register_state_dict_pre_hook(note("state")),
        layer._register_state_dict_hook(note("state after")),
        layer.register_load_state_dict_pre_hook(note("load")),
        layer.register_load_state_dict_post_hook(note("load after")),
    ]
    pre_with_module = []
    layer.register_load_state_dict_pre_hook(lambda module, *_: pre_with_module.append(module))
    del layer
    door(model)
    gc.collect()
    if handles and door is to_linear:
        # One layer at a time: the given one stays, so its handles are its own.
        handles = []
    model(torch.randn(2, 16, requires_grad=True)).sum().backward()
    model.load_state_dict(model.state_dict())
    expected = {
        "before",
        "before with kwargs",
        "after",
        "always",
        "gradient",
        "state",
        "state after",
        "load",
        "load after",
    }
    assert set(calls) == expected and pre_with_module == [model[0]]
    assert calls.count("after") == 1
    if handles:
        for handle in handles:
            handle.remove()
        calls.clear()
        model(torch.randn(2, 16))
        model.load_state_dict(model.state_dict())
        assert not calls


def test_a_hook_that_changes_the_output_still_does(door):
    model = nn.Sequential(two_four(16, 16))
    plain = copy.deepcopy(model)
    model[0].register_forward_hook(lambda module, args, y: y * 3)
    door(model)
    door(plain)
    x = torch.randn(2, 16)
    torch.testing.assert_close(model(x), plain(x) * 3)


def weight_norm(linear):
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(linear)


@pytest.mark.parametrize(
    "change",
    [
        weight_norm,
        nn.utils.spectral_norm,
        lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
        nn.utils.parametrizations.weight_norm,
        lambda linear: nn.utils.parametrize.register_parametrization(linear, "bias", nn.Identity()),
    ],
)
def test_a_weight_that_is_computed_is_refused(door, change):
    model = nn.Sequential(change(nn.Linear(16, 16)))
    with pytest.raises(ValueError, match="parametrizations|computed in a hook"):
        door(model)


def test_sparsify_refuses_a_weight_that_is_computed():
    for change in (nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm):
        for convert in (lambda model: sparsify_(model, semi_sparse_weight(), prune=True), apply_fake_sparsity):
            with pytest.raises(ValueError, match="'0': the weight is no parameter.*remove"):
                convert(nn.Sequential(change(nn.Linear(16, 16))))


def test_a_forward_that_was_replaced_on_the_layer_is_refused(door):
    model = nn.Sequential(two_four(16, 16))
    forward = model[0].forward
    model[0].forward = lambda x: forward(x) * 3
    with pytest.raises(ValueError, match="its forward was replaced on the layer itself"):
        door(model)


def test_attributes_with_names_of_the_new_layers_are_refused():
    linear = two_four(16, 16)
    linear.packed = 3
    with pytest.raises(ValueError, match="attribute `packed`, a name that QuantizedLinear has"):
        QuantizedLinear.from_dense(linear)


def test_parts_of_an_adapter_are_refused_by_name_and_base_layers_are_served():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False)

    def adapted():
        return peft.get_peft_model(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), config)

    def is_linear(module, name):
        return isinstance(module, nn.Linear)

    doors = [
        lambda model, *taken: twofour.quantize_(model, int8_dynamic_activation_int8_weight(prune=True), *taken),
        lambda model, *taken: sparsify_(model, semi_sparse_weight(), *taken, prune=True),
        apply_fake_sparsity,
    ]
    for convert in doors:
        model = adapted()
        with pytest.raises(ValueError, match="lora_A.default' is a part of the adapter of a Linear"):
            convert(model, is_linear)
        assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))
        x = torch.randn(3, 16)
        # By default adapters are left out.
        convert(model)
        assert model(x).shape == (3, 8) and isinstance(model.base_model.model[0].lora_A.default, nn.Linear)
    with pytest.raises(ValueError, match="part of the adapter"):
        swap(adapted())


def test_frozen_layers_stay_frozen():
    linear = two_four(16, 16).requires_grad_(False)
    sparse = twofour.Linear.from_dense(linear)
    assert not sparse.bias.requires_grad and not sparse.to_dense().bias.requires_grad
    assert not SemiSparseLinear.from_dense(linear).to_dense().weight.requires_grad


def test_what_is_sparse_already_is_taken_as_it_is():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1] = twofour.Linear.from_dense(model[1], prune=True)
    sparsify_(model, semi_sparse_weight(), prune="optimal")
    weight = model[0].weight
    assert sparsify_(model, semi_sparse_weight(), prune=True)[0].weight is weight and type(model[1]) is twofour.Linear
    x = torch.randn(3, 16)
    expected = model(x)
    with pytest.raises(ValueError, match="'0': its weight is sparse already, in the other"):
        sparsify_(model, block_sparse_weight(8))
    with pytest.raises(ValueError, match="'0': the weight of this Linear is sparse already"):
        swap_linear_with_semi_sparse_linear(model, {"0": SemiSparseLinear})
    twofour.quantize_(model, int8_dynamic_activation_int8_weight(prune=True))
    assert [type(layer) for layer in model] == [QuantizedLinear] * 2
    torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)
