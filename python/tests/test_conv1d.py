"""transformers' ``Conv1D``, of GPT-2, stores its weight ``[in_features, out_features]``: what prunes it prunes columns,
and what cannot says so."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

import twofour  # noqa: E402
from twofour.quantization import int8_dynamic_activation_int8_weight  # noqa: E402
from twofour.sparsity import (  # noqa: E402
    SupermaskLinear,
    WandaSparsifier,
    apply_fake_sparsity,
    block_sparse_weight,
    semi_sparse_weight,
    sparsify_,
)
from twofour.sparsity.training import SemiSparseLinear, swap_linear_with_semi_sparse_linear  # noqa: E402

NAMES = [f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
IDS = torch.arange(6)[None]


def gpt2():
    torch.manual_seed(2)
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=33, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).eval()


def largest(weight, scores=None):
    """The weight with the two largest of each four inputs."""
    groups = (weight.abs() if scores is None else scores).t().unflatten(1, (-1, 4))
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, groups.topk(2).indices, True)
    return weight * kept.flatten(1).t()


def test_functions_prune_the_inputs_of_an_output_and_the_model_is_saved_and_loaded(tmp_path):
    dense = gpt2()
    fake = apply_fake_sparsity(copy.deepcopy(dense))
    sparse = sparsify_(copy.deepcopy(dense), semi_sparse_weight(), prune=True)
    assert sparsify_(copy.deepcopy(fake), semi_sparse_weight()).get_submodule(NAMES[0]).weight.shape == (16, 48)
    for name in NAMES:
        expected = largest(dense.get_submodule(name).weight.detach())
        assert torch.equal(fake.get_submodule(name).weight, expected)
        assert torch.equal(sparse.get_submodule(name).weight.to_dense(), expected)
    assert torch.equal(fake.lm_head.weight, dense.lm_head.weight)
    logits = fake(IDS).logits
    torch.testing.assert_close(sparse(IDS).logits, logits)
    sparse.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(GPT2LMHeadModel.from_pretrained(tmp_path / "saved")(IDS).logits, logits)
    twofour.save_file(sparse, tmp_path / "model.safetensors")
    loaded = twofour.load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded[f"{NAMES[2]}.weight"], fake.get_submodule(NAMES[2]).weight)


@pytest.mark.parametrize("block", [4, 8, None])
def test_wanda_compares_the_inputs_of_an_output(block):
    model = nn.Sequential(Conv1D(16, 16))
    dense, x = model[0].weight.detach().clone(), torch.randn(5, 16) * torch.arange(1, 17)
    wanda = WandaSparsifier(semi_structured_block_size=block)
    wanda.prepare(model, [{"tensor_fqn": "0.weight"}])
    model(x)
    wanda.step()
    wanda.squash_mask()
    size = block or 16
    scores = (dense.abs() * x.square().sum(0).sqrt()[:, None]).t().unflatten(1, (-1, size))
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(size // 2).indices, True)
    assert torch.equal(model[0].weight, dense * kept.flatten(1).t())
    whole = gpt2()
    wanda = WandaSparsifier(semi_structured_block_size=4)
    wanda.prepare(whole, None)
    assert [group["module_fqn"] for group in wanda.groups] == NAMES


def test_what_takes_linear_layers_alone_refuses_it_by_name():
    def takes(module, name):
        return isinstance(module, Conv1D)

    layer = Conv1D(16, 16)
    for convert in (twofour.Linear.from_dense, twofour.Int4Linear.from_dense, SemiSparseLinear.from_dense):
        with pytest.raises(TypeError, match=r"not a Conv1D, whose weight is stored \[in_features, out_features\]"):
            convert(layer)
    with pytest.raises(TypeError, match="not a Conv1D"):
        SupermaskLinear.from_linear(layer)
    with pytest.raises(ValueError, match=r"c_attn.*block-sparse: leave it out"):
        sparsify_(gpt2(), block_sparse_weight(4), takes)
    with pytest.raises(ValueError, match=r"c_fc' is a Conv1D, not a Linear"):
        swap_linear_with_semi_sparse_linear(gpt2(), {NAMES[2]: SemiSparseLinear})
    with pytest.raises(ValueError, match=r"c_attn' and others of its kind store their weight \[in_features"):
        twofour.quantize_(gpt2(), int8_dynamic_activation_int8_weight(prune=True))
