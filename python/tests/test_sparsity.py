"""Pruning and compressing models: sparsify_, fake sparsity, Wanda, masks."""

import copy
import pickle

import pytest
import torch
from conftest import close
from torch.ao.pruning import WeightNormSparsifier

from twofour.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured
from twofour.sparsity import (
    PerChannelNormObserver,
    SemiSparseWeightConfig,
    WandaSparsifier,
    apply_fake_sparsity,
    create_semi_structured_tensor,
    mask_creator,
    semi_sparse_weight,
    sparsify_,
)


def mlp(device="cpu", dtype=torch.float32):
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 20)).to(device, dtype)


def two_of_four(weight):
    return ((weight != 0).view(-1, 4).sum(-1) == 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pruned_model_is_compressed(device, dtype):
    net = mlp(device, dtype)
    original = copy.deepcopy(net)
    assert apply_fake_sparsity(net) is net
    for found, dense in ((net[0].weight, original[0].weight), (net[2].weight, original[2].weight)):
        kept = dense.abs().view(-1, 4).argsort(dim=-1, descending=True, stable=True)[:, :2]
        expected = torch.zeros_like(dense).view(-1, 4).scatter_(-1, kept, dense.view(-1, 4).gather(-1, kept))
        assert torch.equal(found, expected.view_as(dense))
    x = torch.randn(5, 32, device=device, dtype=dtype)
    expected = net.double()(x.double())
    net.to(dtype)
    for config in (semi_sparse_weight(), SemiSparseWeightConfig(alg_id=3), semi_sparse_weight):
        sparse = copy.deepcopy(net)
        assert sparsify_(sparse, config) is sparse
        assert isinstance(sparse[0].weight, SparseSemiStructuredTensor) and not sparse[0].weight.requires_grad
        with torch.inference_mode():
            close(sparse(x), expected)


def test_the_filter_chooses_by_module_and_name():
    net = apply_fake_sparsity(mlp(), lambda module, name: name == "2")
    assert two_of_four(net[2].weight) and not two_of_four(net[0].weight)
    sparsify_(
        net, semi_sparse_weight(), lambda module, name: isinstance(module, torch.nn.Linear) and name.startswith("2")
    )
    assert isinstance(net[2].weight, SparseSemiStructuredTensor) and type(net[0].weight) is torch.nn.Parameter
    linear = sparsify_(torch.nn.Linear(8, 8), semi_sparse_weight(), prune=True)
    assert isinstance(linear.weight, SparseSemiStructuredTensor)


def test_what_is_not_2_4_is_an_error_that_names_the_place_and_changes_nothing():
    net = apply_fake_sparsity(mlp())
    with torch.no_grad():
        net[2].weight[7, 20:24] = 1
    with pytest.raises(ValueError, match=r"'2': .*row 7, group 5.*prune=True"):
        sparsify_(net, semi_sparse_weight())
    assert type(net[0].weight) is torch.nn.Parameter
    for prune in (True, "optimal"):
        pruned = sparsify_(copy.deepcopy(net), semi_sparse_weight(), prune=prune)
        assert torch.equal(
            pruned[2].weight.to_dense(), to_sparse_semi_structured(net[2].weight, prune=prune).to_dense()
        )
    with pytest.raises(ValueError, match="'1', a ReLU"):
        sparsify_(net, semi_sparse_weight(), lambda module, name: True if name == "1" else False)
    with pytest.raises(TypeError, match="SemiSparseWeightConfig"):
        sparsify_(net, {"alg_id": 0})
    with pytest.raises(RuntimeError, match="'0': .*float64"):
        sparsify_(mlp().double(), semi_sparse_weight())
    with pytest.raises(ValueError, match="the model itself: .*row 0"):
        sparsify_(torch.nn.Linear(8, 8), semi_sparse_weight())


def test_tied_weights_stay_tied():
    net = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
    net[1].weight = net[0].weight
    sparsify_(net, semi_sparse_weight(), prune=True)
    assert net[1].weight is net[0].weight


def test_masks_of_torchs_sparsifier_are_compressed():
    net = mlp()
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(net, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}])
    sparsifier.step()
    with pytest.raises(ValueError, match="squash_mask"):
        sparsify_(net, semi_sparse_weight())
    sparsifier.squash_mask()
    x = torch.randn(5, 32)
    expected = copy.deepcopy(net).double()(x.double()).detach()
    weight = to_sparse_semi_structured(net[0].weight.detach())
    assert torch.equal(weight.to_dense(), net[0].weight.detach()) and two_of_four(net[0].weight)
    sparsify_(net, semi_sparse_weight())
    with torch.no_grad():
        close(net(x), expected)


def wanda(net, x, config=None, **options):
    sparsifier = WandaSparsifier(**options)
    sparsifier.prepare(net, config)
    for batch in x:
        net(batch)
    sparsifier.step()
    return sparsifier


def row(values):
    net = torch.nn.Sequential(torch.nn.Linear(len(values), 1, bias=False))
    net[0].weight.data = torch.tensor([values], dtype=torch.float32)
    return net


@pytest.mark.parametrize("peer", [False, True])
def test_wandas_documented_examples(peer):
    net = row(range(1, 9))
    wanda(net, [torch.ones(1, 8)], semi_structured_block_size=4, peer=peer).squash_mask()
    assert net[0].weight.tolist() == [[0, 0, 3, 4, 0, 0, 7, 8]]
    net = row([1, 2, 3, 4])
    wanda(net, [torch.tensor([[100, 10, 1, 0.1]])], peer=peer).squash_mask()
    assert net[0].weight.tolist() == [[1, 2, 0, 0]]


def test_wanda_takes_the_norm_over_all_tokens_and_compares_within_rows():
    torch.manual_seed(3)
    net = mlp()
    batches = [torch.randn(4, 3, 32) * torch.linspace(0.1, 3, 32) for _ in range(3)]
    weight = net[0].weight.detach().clone()
    norm = torch.cat([b.reshape(-1, 32) for b in batches]).double().norm(dim=0)
    for block in (None, 2, 4, 8):
        found = copy.deepcopy(net)
        sparsifier = wanda(found, batches, semi_structured_block_size=block)
        close(found[0].activation_post_process.norm, norm)
        sparsifier.squash_mask()
        score = (weight.double().abs() * norm).view(64, -1, block or 32)
        kept = score >= score.median(dim=-1, keepdim=True).values.nextafter(torch.tensor(torch.inf).double())
        assert torch.equal(found[0].weight, weight * kept.view_as(weight))
    # The peers' order differs: the squared norm, over the whole layer.
    found = copy.deepcopy(net)
    wanda(found, batches, peer=True).squash_mask()
    score = weight.double().abs() * norm.square()
    assert torch.equal(found[0].weight, weight * (score > score.flatten().sort().values[weight.numel() // 2 - 1]))


def test_wandas_configuration_levels_and_cleaning_up():
    net = mlp()
    x = [torch.randn(6, 32)]
    before = (set(net.state_dict()), net[2].weight.detach().clone())
    config = [{"tensor_fqn": "0.weight", "sparsity_level": 0.25}]
    wanda(net, x, config).squash_mask(params_to_keep=("sparsity_level",))
    assert (net[0].weight == 0).sum(1).tolist() == [8] * 64 and torch.equal(net[2].weight, before[1])
    assert net[0].sparse_params == {"sparsity_level": 0.25}
    assert set(net.state_dict()) == before[0] and not net[0]._forward_pre_hooks
    assert not hasattr(net[0], "activation_post_process")


def test_wandas_masks_grow_back():
    net = row([1, 2, 3, 4])
    sparsifier = wanda(net, [torch.ones(1, 4)])
    assert net[0].weight.tolist() == [[0, 0, 3, 4]]
    net[0].activation_post_process.reset()
    net(torch.tensor([[100, 100, 1, 1.0]]))
    sparsifier.step()
    assert net[0].weight.tolist() == [[1, 2, 0, 0]]


def test_wanda_refuses_what_it_cannot_do():
    sparsifier = WandaSparsifier()
    sparsifier.prepare(mlp(), None)
    with pytest.raises(ValueError, match="has seen no input"):
        sparsifier.step()
    for options in ({"sparsity_level": 1.5}, {"sparsity_level": -0.1}, {"semi_structured_block_size": 1}):
        with pytest.raises(ValueError):
            WandaSparsifier(**options)
    with pytest.raises(ValueError, match="multiple of semi_structured_block_size"):
        wanda(row(range(6)), [torch.ones(1, 6)], semi_structured_block_size=4)
    observer = PerChannelNormObserver()
    observer(torch.ones(2, 3))
    with pytest.raises(ValueError, match="4 channels"):
        observer(torch.ones(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("n, m", [(2, 4), (1, 4), (4, 8), (0, 2), (3, 3)])
def test_mask_creator(device, n, m, dtype):
    tensor = (torch.randn(6, 8, device=device) * 100).to(dtype)
    mask = mask_creator(tensor, n, m)
    assert mask.dtype == dtype and mask.shape == tensor.shape and ((mask == 0) | (mask == 1)).all()
    if tensor.numel() % m == 0:
        kept, groups = mask.view(-1, m).bool(), tensor.abs().view(-1, m)
        assert (kept.sum(-1) == n).all()
        for k, g in zip(kept, groups, strict=True):
            assert not k.any() or k.all() or g[k].min() >= g[~k].max()


def test_mask_creator_takes_rows_one_after_the_other_and_refuses_remainders():
    assert mask_creator(torch.tensor([[1.0, 2], [3, 4]])).tolist() == [[0, 0], [1, 1]]
    assert mask_creator(torch.tensor([1.0, -1, 1, 1])).tolist() == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="6 elements.*M=4"):
        mask_creator(torch.ones(2, 3))
    with pytest.raises(ValueError, match="N=5, M=4"):
        mask_creator(torch.ones(4), 5, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_semi_structured_tensors_have_one_nonzero_a_pair(device, dtype):
    tensor = create_semi_structured_tensor(48, 64, dtype, device)
    assert tensor.shape == (48, 64) and tensor.dtype == dtype and tensor.device.type == device
    assert ((tensor != 0).view(-1, 2).sum(-1) == 1).all() and two_of_four(tensor)
    values = tensor[tensor != 0]
    assert (values >= 1).all() and (values < 2).all()
    both = (tensor != 0).view(-1, 2).float().mean(0)
    assert (both - 0.5).abs().max() < 0.1
    if dtype != torch.int8:
        assert torch.equal(to_sparse_semi_structured(tensor).to_dense(), tensor)
    with pytest.raises(ValueError, match="even"):
        create_semi_structured_tensor(4, 5, dtype)


def test_types_that_no_kernel_takes_are_pruned_too():
    net = apply_fake_sparsity(torch.nn.Linear(6, 2, bias=False).double(), None)
    assert ((net.weight[:, :4] != 0).sum(1) == 2).all() and (net.weight[:, 4:] != 0).all()
    weight = torch.tensor([[1.0, -4, 3, 2, 5, 6]])
    net = torch.nn.Linear(6, 1, bias=False).double()
    net.weight.data = weight.double()
    assert apply_fake_sparsity(net).weight.tolist() == [[0, -4, 3, 0, 5, 6]]


def sparse_mlp(**kind):
    net = mlp(**kind)
    return sparsify_(net, semi_sparse_weight(), lambda module, _: isinstance(module, torch.nn.Linear), prune=True)


def test_a_compiled_model_has_the_packed_weights_for_inputs_and_follows_new_ones(device):
    inputs = []

    def backend(graph, examples):
        inputs.append([type(example) for example in examples])
        return graph.forward

    def compile_(net):
        return torch.compile(net, backend=backend, fullgraph=True)

    net, x = sparse_mlp(device=device), torch.randn(3, 32, device=device)
    compiled = compile_(net)
    with torch.no_grad():
        close(compiled(x), net(x))
        other = sparse_mlp(device=device)
        weights = dict(other.named_parameters())
        close(torch.func.functional_call(compiled, {f"_orig_mod.{k}": v for k, v in weights.items()}, (x,)), other(x))
        close(compile_(lambda x: torch.func.functional_call(net, weights, (x,)))(x), other(x))
        assert len(inputs) == 2, "another weight of the same kind was compiled anew"
        net[0].weight.data = other[0].weight
        close(compiled(x), net(x))
        net.load_state_dict(other.state_dict())
        close(compiled(x), net(x))
        with torch.autocast(x.device.type, torch.bfloat16):
            close(compiled(x), net(x))
    x.requires_grad_()
    (found,), (expected,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (compile_(net), net))
    close(found, expected)
    assert not any(issubclass(kind, SparseSemiStructuredTensor) for kinds in inputs for kind in kinds)


def test_layers_of_a_sparse_model_stay_linear_layers():
    net, x = sparse_mlp(), torch.randn(3, 32)
    expected = net(x)
    for same in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.fx.symbolic_trace(net)):
        assert torch.equal(same(x), expected)
        assert [name for name, _ in same.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert isinstance(net[0], torch.nn.Linear) and repr(net[0]) == repr(mlp()[0])
    for strict in (False, True):
        exported = torch.export.export(net, (x,), strict=strict)
        assert torch.equal(exported.module()(x), expected) and "0.weight" in exported.graph_signature.parameters
    weight = net[0].weight
    net[0].weight = torch.nn.Parameter(weight.to_dense())
    assert type(net[0]) is torch.nn.Linear
    close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), expected)
    # As torch's tutorial does.
    net[0].weight = torch.nn.Parameter(weight)
    assert type(net[0]) is type(net[2]) and torch.equal(net(x), expected)
