"Promise: gate and up are found in every layout that frameworks store, and conversion moves columns and nothing else."
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dglu.layout import GATE_UP_LAYOUTS, convert_gate_up, join_gate_up, split_gate_up

LAYOUT = st.sampled_from(GATE_UP_LAYOUTS)


def columns_by_hand(layout: str, n: int) -> list[tuple[str, int]]:
    "What each of the 2n columns holds, written out from each layout's description."
    gate, up = [("gate", i) for i in range(n)], [("up", i) for i in range(n)]
    if layout == "concat": return gate + up
    if layout == "concat_up_first": return up + gate
    width = {"block32": 32, "element": 1}[layout]
    return [c for i in range(0, n, width) for half in (gate, up) for c in half[i:i + width]]


def as_number(column: tuple[str, int]) -> int:
    return column[1] + 1000 * (column[0] == "up")


@pytest.mark.parametrize("layout", GATE_UP_LAYOUTS)
@pytest.mark.parametrize("n", [32, 64, 160])
def test_columns_lie_where_the_layout_says(layout, n):
    x = torch.tensor([as_number(c) for c in columns_by_hand(layout, n)])
    gate, up = split_gate_up(x, layout=layout)
    assert gate.tolist() == list(range(n)) and up.tolist() == list(range(1000, 1000 + n))
    assert join_gate_up(gate, up, layout=layout).tolist() == x.tolist()


@pytest.mark.parametrize("layout, first_eight", [
    ("block32", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("concat", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("concat_up_first", [1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007]),
    ("element", [0, 1000, 1, 1001, 2, 1002, 3, 1003]),
])
def test_first_columns(layout, first_eight):
    assert join_gate_up(torch.arange(64), torch.arange(1000, 1064), layout=layout)[:8].tolist() == first_eight


def test_block32_is_the_default_and_the_contracts():
    x = torch.arange(128)
    gate, up = split_gate_up(x)
    assert gate.tolist() == [*range(32), *range(64, 96)] and up.tolist() == [*range(32, 64), *range(96, 128)]


@pytest.mark.parametrize("n, same", [(32, True), (64, False)])
def test_block32_and_concat_coincide_only_for_one_block(n, same):
    x = torch.arange(2 * n)
    assert torch.equal(convert_gate_up(x, "concat", "block32"), x) == same


@given(LAYOUT, LAYOUT, st.integers(1, 3), st.lists(st.integers(0, 3), max_size=2), st.data())
def test_conversion_and_its_way_back(source, target, blocks, others, data):
    dim = data.draw(st.integers(-len(others) - 1, len(others)))
    shape = list(others)
    shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, 64 * blocks)
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    there = convert_gate_up(x, source, target, dim=dim)
    column_of = {c: i for i, c in enumerate(columns_by_hand(source, 32 * blocks))}
    order = [column_of[c] for c in columns_by_hand(target, 32 * blocks)]
    assert torch.equal(there, x.index_select(dim, torch.tensor(order)))
    assert torch.equal(convert_gate_up(there, target, source, dim=dim), x)


@pytest.mark.parametrize("n", [1, 5, 50])
@pytest.mark.parametrize("layout", ["concat", "concat_up_first", "element"])
def test_layouts_without_blocks_take_any_width(layout, n):
    gate, up = torch.randn(2, 3, n).unbind(0)
    back = split_gate_up(join_gate_up(gate, up, layout=layout), layout=layout)
    assert torch.equal(back[0], gate) and torch.equal(back[1], up)


@pytest.mark.parametrize("source", GATE_UP_LAYOUTS)
def test_converted_weights_and_bias_give_converted_activations(source):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(128, 6).double(), torch.randn(128).double(), torch.randn(9, 6).double()
    c = torch.nn.functional.linear(x, weight, bias)
    converted = torch.nn.functional.linear(x, convert_gate_up(weight, source, "block32", dim=0),
                                           convert_gate_up(bias, source, "block32"))
    torch.testing.assert_close(converted, convert_gate_up(c, source, "block32"))
    transposed = x @ convert_gate_up(weight.T.contiguous(), source, "block32", dim=-1)      # gpt-oss: (hidden, 2N)
    torch.testing.assert_close(transposed, convert_gate_up(x @ weight.T, source, "block32"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
                                   torch.float4_e2m1fn_x2, torch.uint8, torch.bfloat16])
def test_rows_of_every_dtype_move_bit_for_bit(dtype):
    x = torch.randint(0, 256, (128, 4), dtype=torch.uint8)
    moved = convert_gate_up(x.view(dtype), "concat", "element", dim=0)
    assert moved.dtype == dtype
    assert torch.equal(moved.view(torch.uint8), x.view(2, 64, 4).transpose(0, 1).reshape(128, 4))


def test_a_converted_tensor_is_new_memory():
    x = torch.zeros(4, 64)
    same = convert_gate_up(x, "block32", "block32")
    same += 1
    assert not x.any()


@pytest.mark.parametrize("layout", GATE_UP_LAYOUTS)
def test_gradients_pass(layout):
    x = torch.randn(2, 64, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: split_gate_up(t, layout=layout), x)
    assert torch.autograd.gradcheck(lambda t: convert_gate_up(t, "block32", layout), x)


def test_zero_tokens():
    gate, up = split_gate_up(torch.zeros(0, 128))
    assert gate.shape == up.shape == (0, 64) and join_gate_up(gate, up).shape == (0, 128)


FP4 = torch.zeros(128, 128, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


@pytest.mark.parametrize("call, parts", [
    (lambda: split_gate_up(torch.zeros(4, 100)), ["x.shape[-1] = 100", "multiple of 64", "'block32'", "zero columns"]),
    (lambda: split_gate_up(torch.zeros(32, 4), dim=0), ["x.shape[0] = 32", "multiple of 64"]),
    (lambda: split_gate_up(torch.zeros(4, 7), layout="concat"), ["x.shape[-1] = 7", "multiple of 2", "'concat'"]),
    (lambda: split_gate_up(torch.zeros(4, 0), layout="element"), ["x.shape[-1] = 0", "positive multiple of 2"]),
    (lambda: join_gate_up(torch.zeros(4, 33), torch.zeros(4, 33)), ["gate.shape[-1] = 33", "multiple of 32"]),
    (lambda: split_gate_up(torch.zeros(4, 64), layout="interleaved"), ["layout = 'interleaved'", *GATE_UP_LAYOUTS]),
    (lambda: convert_gate_up(torch.zeros(64), "block32", "up_first"), ["layout = 'up_first'", *GATE_UP_LAYOUTS]),
    (lambda: join_gate_up(torch.zeros(4, 32), torch.zeros(4, 64)), ["gate.shape", "[4, 32]", "up.shape", "[4, 64]"]),
    (lambda: join_gate_up(torch.zeros(32), torch.zeros(32).double()), ["gate.dtype", "float32", "up.dtype", "float64"]),
    (lambda: convert_gate_up(FP4, "concat", "block32"), ["dim = -1", "two values", "unpack_fp4"]),
    (lambda: join_gate_up(FP4, FP4, dim=1), ["dim = 1", "two values", "unpack_fp4"]),
])
def test_a_bad_argument_is_named(call, parts):
    with pytest.raises(ValueError) as error: call()
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_dimension_out_of_range_does_not_wrap_around():
    with pytest.raises(IndexError): split_gate_up(torch.zeros(64, 64), dim=2)
    with pytest.raises(IndexError): join_gate_up(torch.zeros(64, 64), torch.zeros(64, 64), dim=-3)
