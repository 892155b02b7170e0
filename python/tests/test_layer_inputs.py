"""Pruning a layer by its inputs."""

import numpy as np
import pytest

import twofour

torch = pytest.importorskip("torch")


def layer(features=32, out=24, tokens=400, seed=0):
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((features, features)) * 0.3 + np.eye(features)
    weight, inputs = rng.standard_normal((out, features)), rng.standard_normal((tokens, features)) @ mix
    return weight.astype(np.float32), inputs.astype(np.float32)


def error(weight, pruned, inputs):
    return float((((np.asarray(weight) - np.asarray(pruned)) @ inputs.T) ** 2).sum())


def test_solvers_leave_less_error_than_masks_alone():
    weight, x = layer()
    inputs = twofour.LayerInputs(32)
    inputs.add(x[:100])
    inputs.add(x[100:].reshape(3, 100, 32))
    errors = {}
    for method in ("magnitude", "wanda", "ria", "sparsegpt", "alps"):
        for refit in (0, 10):
            pruned = inputs.prune(weight, method, refit=refit)
            assert twofour.verify(pruned)
            errors[method, refit] = error(weight, pruned, x)
        assert errors[method, 10] < errors[method, 0]
    assert errors["alps", 10] < errors["sparsegpt", 10] < errors["wanda", 0]
    swapped = inputs.prune(weight, "wanda", swaps=100, refit=0)
    assert error(weight, swapped, x) < errors["wanda", 0]
    masked = inputs.prune(weight, "wanda", refit=0)
    assert np.array_equal(masked[masked != 0], weight[masked != 0])


def test_the_errors_of_earlier_layers_are_made_up_for():
    weight, dense = layer(seed=1)
    x = (0.8 * dense + 0.2 * np.roll(dense, 1, axis=1)).astype(np.float32)
    inputs = twofour.LayerInputs(32)
    inputs.add(x, dense)
    target = dense @ weight.T
    far, near = (
        ((x @ inputs.prune(weight, compensation=share).T - target) ** 2).sum() for share in (0.0, 1.0)
    )
    assert near < 0.7 * far


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_give_tensors_of_their_dtype(dtype):
    weight, x = layer(seed=2)
    inputs = twofour.LayerInputs(32)
    inputs.add(torch.tensor(x, requires_grad=True))
    pruned = inputs.prune(torch.tensor(weight).to(dtype))
    assert pruned.dtype == dtype and pruned.shape == (24, 32)
    assert (pruned.view(-1, 4) != 0).sum(1).max() <= 2


def test_what_does_not_fit_is_said():
    weight, x = layer()
    inputs = twofour.LayerInputs(32)
    with pytest.raises(ValueError, match="no token"):
        inputs.prune(weight)
    with pytest.raises(ValueError, match="32"):
        inputs.add(x[:, :31])
    bad = x.copy()
    bad[3, 5] = np.nan
    with pytest.raises(ValueError, match="token 3.*feature 5"):
        inputs.add(bad)
    inputs.add(x)
    with pytest.raises(ValueError, match="with all or none"):
        inputs.add(x, x)
    with pytest.raises(ValueError, match="alps"):
        inputs.prune(weight, "best")
    with pytest.raises(TypeError, match="int8.*before it is quantized"):
        inputs.prune(weight.astype(np.int8))
    with pytest.raises(ValueError, match="31 columns"):
        inputs.prune(weight[:, :31])
    with pytest.raises(ValueError, match="from 0 to 1"):
        both = twofour.LayerInputs(32)
        both.add(x, x)
        both.prune(weight, compensation=2.0)


def test_factors_replace_a_weight_or_stand_beside_a_pruned_one():
    weight, x = layer(features=32, out=24, seed=3)
    inputs = twofour.LayerInputs(32)
    inputs.add(x)
    errors = []
    for rank in (1, 4, "50%", 24, 1000):
        s, q = inputs.low_rank(weight, rank)
        assert s.dtype == np.float32 and s.shape[1] == q.shape[0] <= 24
        errors.append(error(weight, s @ q, x))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-4 * errors[0]
    # The least that any factors of that rank leave: numpy's singular values of W·X.
    s, q = inputs.low_rank(weight, 6)
    best = (np.linalg.svd(weight @ x.T, compute_uv=False)[6:] ** 2).sum()
    assert best * 0.999 < error(weight, s @ q, x) < best * 1.01
    pruned = inputs.prune(weight)
    s, q = inputs.low_rank(torch.tensor(weight - pruned), 6)
    assert isinstance(s, torch.Tensor)
    assert error(weight, pruned + (s @ q).numpy(), x) < 0.6 * error(weight, pruned, x)
    # Two layers in place of one.
    s, q = inputs.low_rank(torch.tensor(weight), "50%")
    pair = torch.nn.Sequential(torch.nn.Linear(32, len(q), bias=False), torch.nn.Linear(len(q), 24, bias=False))
    pair[0].weight.data, pair[1].weight.data = q, s
    torch.testing.assert_close(pair(torch.tensor(x)).detach(), torch.tensor(x) @ (s @ q).T, atol=1e-3, rtol=1e-3)
    for rank in (0, -1, "0%", "x", 1.5):
        with pytest.raises(ValueError, match="rank"):
            inputs.low_rank(weight, rank)
    with pytest.raises(ValueError, match="shape"):
        inputs.low_rank(weight[:, :8], 2)
    with pytest.raises(ValueError, match="no token"):
        twofour.LayerInputs(32).low_rank(weight, 2)
    weight[1, 2] = np.nan
    with pytest.raises(ValueError, match="row 1, column 2"):
        inputs.low_rank(weight, 2)
