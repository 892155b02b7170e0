"""Linear layers of a whole model become products of a lower rank, by a budget."""

import copy
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import twofour  # noqa: E402


class Model(nn.Module):
    """Layers that are wide, tall and square, the first under two names."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.wide = nn.Linear(32, 24)
        self.tall = nn.Linear(24, 64, bias=False)
        self.square = nn.Linear(64, 64)
        self.again = self.wide
        self.to(dtype)

    def forward(self, tokens, scale=1.0):
        x = torch.tanh(self.wide(self.embed(tokens) * scale))
        return self.square(torch.relu(self.tall(x)))


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (4, 12), generator=generator) for _ in range(count)]


def inputs_of(model, calibration):
    """What enters each linear layer, by numpy."""
    found, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            take = lambda _, args, name=name: found.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))
            handles.append(module.register_forward_pre_hook(take))
    with torch.no_grad():
        for batch in calibration:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts).double().numpy() for name, parts in found.items()}


def spectrum(matrix, x):
    """The squared singular values of the outputs: numpy's."""
    return np.linalg.svd(matrix @ x.T, compute_uv=False) ** 2


@pytest.mark.parametrize("sparsity", [None, "2:4"])
def test_errors_are_the_least_of_their_ranks_by_numpy(device, sparsity):
    dense, calibration = Model().eval(), batches()
    model = copy.deepcopy(dense).to(device)
    report = twofour.low_rank_(model, [batch.to(device) for batch in calibration], rank=5, sparsity=sparsity)
    assert all(parameter.device.type == device for parameter in model.parameters())
    model.cpu()
    inputs = inputs_of(dense, calibration)
    assert [layer.name for layer in report.layers] == ["wide", "tall", "square"]
    for layer in report.layers:
        weight, x = getattr(dense, layer.name).weight.detach().double().numpy(), inputs[layer.name]
        new = getattr(model, layer.name)
        part = 0.0
        if sparsity:
            part = new.sparse.dense_weight()
            assert twofour.verify(part)
            part = part.double().numpy()
        best = spectrum(weight - part, x)[5:].sum() / spectrum(weight, x).sum()
        found = ((weight - new.weight.detach().double().numpy()) @ x.T) ** 2
        assert layer.rank == 5 and layer.tokens == len(x)
        assert best * 0.999 < layer.error < best * 1.001 + 1e-9
        np.testing.assert_allclose(layer.error, found.sum() / spectrum(weight, x).sum(), rtol=1e-3)
        np.testing.assert_allclose(
            new(torch.tensor(x, dtype=torch.float32)).detach().numpy(),
            x @ new.weight.detach().double().numpy().T + (0 if new.bias is None else new.bias.detach().numpy()),
            atol=1e-4,
        )
    assert model.wide is model.again and model.wide.s.bias is model.wide.bias is not None


@pytest.mark.parametrize("sparsity", [None, "2:4"])
@pytest.mark.parametrize("unit", ["parameters", "memory"])
def test_a_budget_of_the_whole_model_is_kept_and_leaves_less_error_than_one_rank(unit, sparsity):
    dense = Model()

    def factored(**budget):
        model = copy.deepcopy(dense)
        report = twofour.low_rank_(model, batches(), sparsity=sparsity, **budget)
        assert report.parameters_before == sum(p.numel() for p in dense.parameters())
        own = dict(model.named_parameters())
        stored = {name: t for name, t in model.state_dict().items() if not name.startswith("again")}
        kept = sum(t.numel() for name, t in stored.items() if name in own or name.endswith("weight_values"))
        assert (report.parameters_after, report.bytes_after) == (kept, sum(t.nbytes for t in stored.values()))
        return report, sum(layer.error for layer in report.layers)

    size = lambda report: report.parameters_after if unit == "parameters" else report.bytes_after
    one_rank, error = factored(rank=5 if sparsity else "60%")
    report, spent_well = factored(**{unit: size(one_rank)})
    # Less than a direction of the largest layer is left.
    step = (64 + 64) * (1 if unit == "parameters" else 4)
    assert size(one_rank) - step < size(report) <= size(one_rank)
    assert spent_well < error
    before = report.parameters_before if unit == "parameters" else report.bytes_before
    assert size(factored(**{unit: "80%"})[0]) <= 0.8 * before


def test_a_budget_buys_the_least_error_of_all_choices():
    dense, calibration = Model(), batches()
    inputs = inputs_of(dense.eval(), calibration)
    # Every choice of ranks, by numpy; None is the dense layer.
    choices = []
    for name in ("wide", "tall"):
        weight = getattr(dense, name).weight.detach().double().numpy()
        energies = spectrum(weight, inputs[name])
        ranks = [k for k in range(1, min(weight.shape) + 1) if k * sum(weight.shape) < weight.size]
        choices.append([(k * sum(weight.shape), energies[k:].sum() / energies.sum()) for k in ranks])
        choices[-1].append((weight.size, 0.0))
    elsewhere = sum(p.numel() for p in dense.parameters()) - dense.wide.weight.numel() - dense.tall.weight.numel()
    for allowed in (200, 900, 1500, 2000, 2304):
        fits = [a[1] + b[1] for a in choices[0] for b in choices[1] if a[0] + b[0] <= allowed]
        report = twofour.low_rank_(
            copy.deepcopy(dense), calibration, parameters=elsewhere + allowed,
            filter_fn=lambda module, name: name in ("wide", "tall"),
        )  # fmt: skip
        assert report.parameters_after <= elsewhere + allowed
        largest_step = max(a[1] - b[1] for layer in choices for a, b in zip(layer, layer[1:]))
        assert min(fits) - 1e-6 <= sum(layer.error for layer in report.layers) <= min(fits) + largest_step
    assert [layer.rank for layer in report.layers] == [None, None]


@pytest.mark.parametrize("sparsity", [None, "2:4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_and_files_load_into_the_dense_model(tmp_path, sparsity, dtype):
    model = Model(dtype).eval()
    report = twofour.low_rank_(model, batches(), parameters="70%", sparsity=sparsity)
    assert any(layer.rank for layer in report.layers) and "whole model" in str(report)
    with torch.no_grad():
        expected = model(batches()[0])
    torch.save(model.state_dict(), tmp_path / "state.pt")
    twofour.save_file(model, tmp_path / "model.safetensors")
    of_file = twofour.load_file(tmp_path / "model.safetensors", framework="torch")
    for state in (torch.load(tmp_path / "state.pt"), of_file):
        again = Model(dtype).eval()
        result = twofour.load_low_rank_(again, state)
        assert not result.missing_keys and not result.unexpected_keys
        assert again.wide is again.again
        with torch.no_grad():
            assert torch.equal(again(batches()[0]), expected)
    # Dense again, it computes the same.
    assert twofour.to_dense(model) and all(type(layer) is nn.Linear for layer in (model.wide, model.tall))
    with torch.no_grad():
        tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(model(batches()[0]), expected, atol=tolerance, rtol=0.02)


def test_what_a_layer_has_beside_its_weight_stays_and_factors_train():
    model = Model()
    seen = []
    handle = model.square.register_forward_hook(lambda *_: seen.append(1))
    model.square.tag = "kept"
    model.tall.weight.requires_grad_(False)
    model.square.eval()
    twofour.low_rank_(model, [{"tokens": batch, "scale": 2.0} for batch in batches()], rank=4)
    assert model.training and not model.square.training and model.square.tag == "kept" and len(seen) == 6
    model(batches()[0]).sum().backward()
    assert len(seen) == 7 and model.square.q.weight.grad is not None and model.square.s.bias.grad is not None
    assert model.tall.s.weight.grad is None and not model.square._forward_pre_hooks
    handle.remove()
    # Factors are left as they are by default, and what is asked for is refused.
    with pytest.raises(ValueError, match="no linear layer.*chosen"):
        twofour.low_rank_(model, batches(), rank=2)
    with pytest.raises(ValueError, match="'wide.q' is a part of a LowRankLinear"):
        twofour.low_rank_(model, batches(), rank=2, filter_fn=lambda _, name: name == "wide.q")


def test_layers_stored_the_other_way_round_and_encoders_of_torch(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=40, n_positions=32)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(40, (8, 30))
    with torch.no_grad():
        expected = model(tokens).logits
        report = twofour.low_rank_(model, [{"input_ids": tokens}], parameters="100%")
        assert all(layer.rank is None and layer.error == 0 for layer in report.layers) and len(report.layers) == 4
        report = twofour.low_rank_(model, [{"input_ids": tokens}], rank=12)
        assert [layer.shape for layer in report.layers] == [(96, 32), (32, 32), (128, 32), (32, 128)]
        assert (model(tokens).logits - expected).norm() < 0.2 * expected.norm()
    with pytest.raises(ValueError, match="LowRankLinear, and from_pretrained would initialize"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    state = model.state_dict()
    again = transformers.GPT2LMHeadModel(config).eval()
    twofour.load_low_rank_(again, state)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    # The attention of torch reads the weight of its output layer: no token reaches that, and it stays dense.
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    x = torch.randn(4, 40, 32)
    with torch.no_grad():
        report = twofour.low_rank_(encoder, [x], rank=12)
        assert {layer.name.rpartition(".")[2] for layer in report.layers if layer.rank} == {"linear1", "linear2"}
        assert all(layer.rank is None for layer in report.layers if not layer.tokens)
        fast = encoder(x)
    with torch.enable_grad():
        torch.testing.assert_close(fast, encoder(x.requires_grad_()), atol=1e-4, rtol=1e-4)


def test_experts_without_tokens_stay_dense_and_adapters_come_last():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    tokens = torch.randint(50, (8, 20))
    calibration = [transformers.BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})]
    lora = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["query"], r=2))
    with pytest.raises(ValueError, match="'.*query.base_layer' is the base layer of an adapter"):
        twofour.low_rank_(lora, calibration, rank=4)
    # Layers of which a run of the model makes no use.
    model.encoder.layer.insert(1, copy.deepcopy(model.encoder.layer[1]))

    def skip(model, batch):
        model.encoder.layer = kept
        model(**batch)
        model.encoder.layer = whole

    whole, kept = model.encoder.layer, nn.ModuleList([model.encoder.layer[0], model.encoder.layer[2]])
    report = twofour.low_rank_(model, calibration, parameters="70%", call=skip)
    unreached = [layer for layer in report.layers if ".layer.1." in layer.name]
    assert len(unreached) == 6 and all(layer.rank is None and layer.tokens == 0 for layer in unreached)
    assert "no token reached it" in str(report) and report.parameters_after <= 0.7 * report.parameters_before
    # Factors take adapters.
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q", "s"], r=2))
    lora(tokens).last_hidden_state.sum().backward()


def test_what_cannot_be_factored_is_named_and_the_model_stays_as_it_was():
    def refused(match, error=ValueError, model=None, calibration=None, **options):
        model = Model() if model is None else model
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if not {"rank", "parameters", "memory"} & options.keys():
            options["rank"] = 4
        with pytest.raises(error, match=match):
            twofour.low_rank_(model, batches() if calibration is None else calibration, **options)
        assert before.keys() == model.state_dict().keys()
        assert not any(module._forward_pre_hooks for module in model.modules())

    refused("one of rank, parameters and memory", rank=3, parameters=1000)
    refused("2:4", sparsity="1:4")
    for rank in (0, -1, "0%", "101%", "x", 1.5, True, "5"):
        refused("rank", rank=rank)
    refused(r"1000 parameters are too few.*has \d+, \d+ of them elsewhere", parameters=1000)
    refused("2000 bytes are too few", memory=2000)
    refused("no batches", calibration=[])
    refused("no linear layer", filter_fn=lambda *_: False)
    refused("'embed': a torch.nn.Linear is required", TypeError, filter_fn=lambda _, name: name == "embed")
    refused("best", sparsity="2:4", method="best")
    model = Model()
    model.tall.weight.data[3, 2] = torch.nan
    refused("'tall'.*NaN", model=model)
    model = Model()
    model.embed.weight.data[:] = torch.inf
    refused("'wide'.*infinity", model=model)
    refused("'wide'.*is inf", model=model, sparsity="2:4")
    model = Model()
    model.embed.weight.data[:] = 0
    refused("'wide': zeros alone", model=model)
    model = Model()
    model.square.weight = nn.Linear(64, 64).weight
    model.other = nn.Linear(64, 64)
    model.other.weight = model.square.weight
    refused("'square': its weight is that of 'other', too", model=model)
    model = Model()
    model.unused = nn.Linear(64, 64)
    refused("'unused': no token", model=model, filter_fn=lambda module, _: isinstance(module, nn.Linear))
    model = Model()
    model.square = twofour.Linear.from_dense(model.square, prune=True)
    refused("'square'.*sparse already", model=model, filter_fn=lambda module, _: isinstance(module, nn.Linear))
    refused("'wide'.*float64", TypeError, model=Model(torch.float64), sparsity="2:4")
    model = Model()
    model.tall.to("meta")
    refused("'tall'.*meta", model=model)
    model = nn.Linear(32, 32)
    refused("the model itself", model=model, calibration=[torch.randn(64, 32)], filter_fn=lambda *_: True)
    with pytest.warns(UserWarning, match="fewer tokens than they have inputs, such as 'wide', 10 for 32"):
        twofour.low_rank_(Model(), [torch.arange(10)[None]], rank=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twofour.low_rank_(Model(), iter(batches()), rank=4)
    # Factors of another model.
    state = Model().state_dict()
    state.update({"tall.q.weight": torch.zeros(3, 24), "tall.s.weight": torch.zeros(65, 3)})
    with pytest.raises(RuntimeError, match="'tall': factors.*65"):
        twofour.load_low_rank_(Model(), state)
