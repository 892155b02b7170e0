"""The native operators: what is known of their results before they are computed is what they are."""

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.flop_counter import FlopCounterMode
from torch._subclasses.fake_tensor import FakeTensorMode

from twofour import operators
from twofour.modules import integers, linear  # noqa: F401 (define operators, as `master` does)
from twofour.operators import masks, master  # noqa: F401
from twofour.sparsity import BlockSparseTensor

OPS = torch.ops.twofour
SHAPES = [(37, 300), (16, 64), (5, 131), (1, 1), (130, 33)]
GREEDY, IDENTITY = operators.RULES["greedy"], operators.ACTIVATIONS[None]


def two_four(rows, cols, dtype, device):
    kept = torch.zeros(rows, -(-cols // 4) * 4, dtype=torch.bool)
    kept[:, ::4] = kept[:, 3::4] = True
    return (torch.randn(rows, cols) * kept[:, :cols]).to(dtype).to(device)


def calls_of(rows, cols, device):
    """A call of each operator, by name, for each type that tells layouts apart."""
    seed, integers = torch.tensor([3]), two_four(rows, cols, torch.float32, "cpu").mul(9).to(torch.int8)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        dense, x = two_four(rows, cols, dtype, device), torch.randn(2, 3, cols, device=device).to(dtype)
        bias, dy = torch.randn(rows, device=device).to(dtype), torch.randn(2, 3, rows, device=device).to(dtype)
        packed, packed_t, tiles = OPS.pack(dense, GREEDY, 1.0, True, True)
        if device == "cpu":
            found += [("pack_sparse", (dense,)), ("quantize_rows", (dense,)), ("quantize_int4", (dense, 128))]
            blocks = BlockSparseTensor.from_dense(dense, 16)
            parts = blocks.crow_indices(), blocks.col_indices(), blocks.values()
            found.append(("block_sparse_linear", (x, *parts, rows)))
            found += [
                ("gated_gelu", (torch.randn(3, 2 * cols).to(dtype),)),
                ("gated_gelu_gradient", (torch.randn(3, 2 * cols).to(dtype), torch.randn(3, cols).to(dtype))),
            ]
        found += [
            ("linear", (x, packed, rows)),
            ("linear_bias", (x, packed, bias, rows, IDENTITY)),
            ("input_gradient", (dy, packed, cols)),
            ("master_linear", (x, dense, bias, GREEDY)),
            ("layer_linear", (x, packed, bias, rows, cols)),
            ("sparse_linear", (x, packed, None, bias, rows, cols)),
            ("pack", (dense, GREEDY, 1.0, True, True)),
            ("pack", (dense, GREEDY, 1.0, False, True)),
            ("pack_together", ([dense, dense[:3]], GREEDY, True)),
            ("pack_together", ([dense], GREEDY, False)),
            ("select_together", ([dense, dense[:3]], GREEDY)),
            ("pack_masked", (dense, tiles, True)),
            ("pack_masked", (dense, tiles, False)),
            ("unpack", (packed, rows, cols)),
            ("unpack", (packed_t, cols, rows)),
            ("canonical", (packed, rows, cols)),
            ("from_canonical", (*OPS.canonical(packed, rows, cols), cols)),
            ("select", (dense, GREEDY)),
            ("soft_threshold_scale", (dense,)),
            ("estimate", (dense, operators.ESTIMATORS["mvue"], 1.0, seed)),
            ("estimate", (dense.t().contiguous().t(), operators.ESTIMATORS["mvue"], 1.0, seed)),
            (
                "sampled_weight_gradient",
                (dy.reshape(-1, rows), x.reshape(-1, cols), operators.ESTIMATORS["mvue"], seed),
            ),
            ("bias_gradient", (dy,)),
        ]
        if dtype == torch.float32:
            number = operators.TYPES[torch.bfloat16]
            found += [
                ("pack", (dense, GREEDY, 1.0, True, True, number)),
                ("pack_together", ([dense], GREEDY, True, number)),
            ]
    packed, x = OPS.pack_sparse(integers), torch.randint(-9, 9, (2, 3, cols), dtype=torch.int8, device=device)
    parts = [part.to(device) for part in OPS.canonical(packed, rows, cols)]
    packed, floats, bias = OPS.from_canonical(*parts, cols), x.bfloat16(), torch.randn(rows, device=device).bfloat16()
    scales = torch.rand(rows, device=device)
    found += [
        ("unpack", (packed, rows, cols)),
        ("canonical", (packed, rows, cols)),
        ("from_canonical", (*parts, cols)),
        ("linear_i8", (x, packed, rows)),
        ("linear_quantized", (floats, packed, scales, rows)),
        ("integer_layer", (floats, packed, scales, bias, rows, cols, -1)),
        ("linear_quantized_bias", (floats, packed, scales, bias, rows, IDENTITY)),
    ]
    for dtype in operators.FLOAT8:
        values = parts[0].float().to(dtype)
        packed, none = OPS.from_canonical(values, parts[1], cols), torch.empty(0, device=device)
        found += [
            ("from_canonical", (values, parts[1], cols)),
            ("canonical", (packed, rows, cols)),
            ("unpack", (packed, rows, cols)),
        ]
        found.append(
            ("linear_float8", (x.float().to(dtype), packed, scales, none, none, rows, operators.TYPES[torch.float16]))
        )
    for group_size in (128, -1):
        parts = [part.to(device) for part in OPS.quantize_int4(two_four(rows, cols, torch.float32, "cpu"), group_size)]
        packed = OPS.pack_int4(*parts, cols, group_size)
        found += [
            ("pack_int4", (*parts, cols, group_size)),
            ("canonical_int4", (packed, rows, cols, group_size)),
            ("dequantize_int4", (packed, rows, cols, group_size)),
            ("linear_int4", (floats, packed, rows, group_size)),
            ("linear_int4_bias", (floats, packed, bias, rows, group_size, IDENTITY)),
        ]
    return found


def as_tuple(result):
    """The tensors of a result, also of lists."""
    if isinstance(result, torch.Tensor):
        return (result,)
    return tuple(tensor for part in result for tensor in as_tuple(part))


def faked(mode, argument):
    if isinstance(argument, list):
        return [faked(mode, each) for each in argument]
    return mode.from_tensor(argument) if isinstance(argument, torch.Tensor) else argument


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_results_have_the_shapes_that_torch_compile_is_told(rows, cols, device):
    calls = calls_of(rows, cols, device)
    for name, arguments in calls:
        operator = getattr(OPS, name).default
        with FakeTensorMode() as mode:
            found = as_tuple(operator(*(faked(mode, argument) for argument in arguments)))
        for fake, real in zip(found, as_tuple(operator(*arguments)), strict=True):
            kinds = [(t.shape, t.dtype, t.device.type, t.stride()) for t in (fake, real)]
            assert kinds[0] == kinds[1], f"{name} of {rows}x{cols}"
    if device == "cpu":
        # The one that returns a number has no shapes.
        assert {name for name, _ in calls} == {
            name for name in dir(OPS) if not name.startswith("_") and name != "name"
        } - {"adamw_step_"}


def test_arguments_may_be_named(device):
    dense = two_four(24, 64, torch.float32, device)
    with FakeTensorMode() as mode:
        packed, packed_t, _ = OPS.pack(
            weight=mode.from_tensor(dense), rule=GREEDY, scale=1.0, transpose=False, check=True
        )
        assert packed_t.numel() == 0
        assert OPS.unpack(packed, cols=64, rows=24).shape == (24, 64)


def test_shapes_are_known_of_symbols(device):
    """A packed activation has a length that is a formula of its rows."""
    dense = two_four(24, 64, torch.float32, device)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        fake = mode.from_tensor(dense, symbolic_context=context)
        for result in OPS.pack(fake, GREEDY, 1.0, True, True):
            assert any(isinstance(size, torch.SymInt) for size in result.shape)
    assert not mode.shape_env.guards


def test_operators_that_multiply_are_counted(device):
    dense, x = two_four(16, 64, torch.float32, device), torch.randn(5, 64, device=device)
    packed = OPS.pack(dense, GREEDY, 1.0, False, True)[0]
    with FlopCounterMode(display=False) as counter:
        OPS.linear(x, packed, 16)
        OPS.input_gradient(torch.randn(5, 16, device=device), packed, 64)
        OPS.sampled_weight_gradient(
            torch.randn(5, 16, device=device), x, operators.ESTIMATORS["mvue"], torch.tensor([1])
        )
    assert counter.get_total_flops() == 3 * 2 * 5 * 16 * 64


def test_batches_of_any_operand_are_computed_one_by_one(device):
    dense, x = two_four(16, 64, torch.float32, device), torch.randn(3, 5, 64, device=device)
    packed = OPS.pack(dense, GREEDY, 1.0, False, True)[0]
    expected = torch.stack([OPS.linear(each, packed, 16) for each in x])
    assert torch.equal(torch.vmap(lambda each: OPS.linear(each, packed, 16))(x), expected)
    batch = torch.stack([packed] * 3)
    assert torch.equal(torch.vmap(lambda each, weight: OPS.linear(each, weight, 16))(x, batch), expected)


@pytest.mark.parametrize("group_size", [128, -1])
def test_a_dequantized_weight_is_integers_times_scales(group_size, device):
    values, meta, scales = (
        part.to(device) for part in OPS.quantize_int4(two_four(37, 300, torch.float32, "cpu"), group_size)
    )
    integers = torch.stack((values & 15, values >> 4), -1).flatten(1).to(torch.int8) - 8
    integers = OPS.unpack(OPS.from_canonical(integers, meta, 300), 37, 300).float()
    expected = integers * (
        scales.float() if group_size < 0 else scales.float().repeat_interleave(group_size, 1)[:, :300]
    )
    assert torch.equal(
        OPS.dequantize_int4(OPS.pack_int4(values, meta, scales, 300, group_size), 37, 300, group_size), expected
    )


def test_masks_in_tiles_are_those_of_bool(device):
    mask = torch.rand(37, 70, device=device) < 0.5
    assert torch.equal(masks.mask_of(masks.tiles_of(mask), 37, 70), mask)
