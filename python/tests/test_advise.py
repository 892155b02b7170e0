"""advise and device_info."""

import pytest
import torch
from torch import nn

import twofour
from twofour.advice import Advice, Comparison


def comparison(**changes):
    fields = {"out_features": 8, "in_features": 4, "layers": 2, "tokens": 1, "dense_us": 30.0, "sparse_us": 20.0}
    return Comparison(**{**fields, "speedup": 1.5, "low": 1.4, "high": 1.6, **changes})


def test_every_distinct_shape_is_measured(device):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 128), nn.LayerNorm(128)).to(
        device
    )
    model[3] = twofour.Linear.from_dense(model[3], prune=True)
    advice = twofour.advise(model, tokens=(1, 16), rounds=3)
    found = [(c.out_features, c.in_features, c.layers, c.tokens) for c in advice.comparisons]
    assert found == [(64, 128, 1, 1), (64, 128, 1, 16), (128, 64, 2, 1), (128, 64, 2, 16)]
    for c in advice.comparisons:
        assert c.dense_us > 0 and c.sparse_us > 0 and c.low <= c.speedup <= c.high
    text = str(advice)
    assert "128x64" in text and "all layers, 16 tokens: " in text and advice.dtype == "float32"
    assert len(text.splitlines()) == 2 + 4 + 2


def test_shapes_alone_and_modules_on_meta():
    advice = twofour.advise([(32, 64), (32, 64)], tokens=[2], dtype=torch.bfloat16, rounds=3)
    assert [(c.layers, c.tokens) for c in advice.comparisons] == [(2, 2)] and advice.dtype == "bfloat16"
    with torch.device("meta"):
        model = nn.Linear(64, 32, dtype=torch.float16)
    assert twofour.advise(model, tokens=[1], rounds=3).dtype == "float16"


def test_times_are_those_of_the_work(device):
    advice = twofour.advise([(64, 64), (1024, 1024)], tokens=[256], rounds=3, device=device)
    small, large = advice.comparisons
    assert large.dense_us > small.dense_us and large.sparse_us > small.sparse_us


def test_verdicts():
    assert comparison().verdict == "faster"
    assert comparison(speedup=0.7, low=0.65, high=0.75).verdict == "slower"
    assert comparison(speedup=1.01, low=0.97, high=1.04).verdict == "as fast"
    assert comparison(speedup=1.2, low=1.0, high=1.4).verdict == "too noisy"
    assert comparison(speedup=0.9, low=0.8, high=1.1).verdict == "too noisy"
    advice = Advice(
        "CPU", "float32", 9, (comparison(), comparison(out_features=16, layers=1, dense_us=60.0, sparse_us=80.0))
    )
    assert advice.speedup(1) == 120 / 120
    assert "16x4" in str(advice) and "all layers, 1 token: 1.00x" in str(advice)
    with pytest.raises(ValueError, match=r"7 tokens were not measured; there are \[1\]"):
        advice.speedup(7)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: twofour.advise(nn.ReLU()), ValueError, "ReLU has no linear layers"),
        (lambda: twofour.advise(nn.Linear(4, 4), tokens=[]), ValueError, "tokens must be"),
        (lambda: twofour.advise(nn.Linear(4, 4), tokens=[0]), ValueError, "tokens must be"),
        (lambda: twofour.advise(nn.Linear(4, 4), rounds=2), ValueError, "rounds must be"),
        (lambda: twofour.advise(nn.Linear(4, 4).double()), NotImplementedError, "float64"),
        (lambda: twofour.advise([(0, 4)]), ValueError, "positive numbers"),
        (lambda: twofour.advise([]), ValueError, "positive numbers"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_device_info():
    info = twofour.device_info()
    assert (info.version, info.engine, info.torch) == (twofour.__version__, twofour.engine(), torch.__version__)
    assert info.threads == torch.get_num_threads() and len(info.gpus) == (
        torch.cuda.device_count() if torch.cuda.is_available() else 0
    )
    assert info.engine in str(info) and torch.__version__ in str(info)
