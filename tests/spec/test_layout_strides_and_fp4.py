"Promise: the contract's shapes and strides come as views, size-1 strides never matter, FP4 pairs lie low nibble first."
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dglu.layout import as_rank3, dense_b, major_of, pack_fp4, unpack_fp4


@pytest.mark.parametrize("m, k", [(6, 4), (1, 4), (6, 1), (0, 4)])
def test_rank3_has_the_contracts_shape_and_is_a_view(m, k):
    x = torch.zeros(m, k)
    y = as_rank3(x)
    assert y.shape == (m, k, 1) and y.data_ptr() == x.data_ptr()
    if m > 1 and k > 1: assert y.stride() == (k, 1, m * k)


def test_rank3_of_a_view_keeps_its_strides():
    x = torch.arange(60).view(6, 10)[1:5, 2:8]
    assert as_rank3(x).stride()[:2] == (10, 1) and torch.equal(as_rank3(x)[..., 0], x)


def test_dense_b_is_a_k_major_view():
    weight = torch.arange(2 * 3 * 4).view(2, 3, 4)
    b = dense_b(weight)
    assert b.shape == (3, 4, 2) and b.stride() == (4, 1, 12) and b.data_ptr() == weight.data_ptr()
    assert [b[..., g].tolist() for g in range(2)] == weight.tolist() and major_of(b) == "k"


@pytest.mark.parametrize("b, major", [
    (torch.zeros(4, 6), "k"),
    (torch.zeros(6, 4).T, "n"),
    (torch.zeros(4, 12)[:, :6], "k"),                                   # rows with a pitch
    (torch.zeros(6, 12)[:, :4].T, "n"),
    (torch.zeros(5, 9)[:, 3:4], "k"),                                   # K = 1: only the stride of N counts
    (torch.zeros(5, 9)[:, 3:4].T, "n"),                                 # N = 1, K with step 9
    (torch.zeros(1, 6), "k"),
    (torch.zeros(9, 9)[::3, ::3][:1, :1], "k"),
    (torch.empty_strided((1, 1), (77, 55)), "k"),
    (torch.zeros(3, 4, 6).permute(1, 2, 0), "k"),
    (torch.zeros(3, 6, 4).permute(2, 1, 0), "n"),
], ids=lambda x: x if isinstance(x, str) else f"{tuple(x.shape)} by {x.stride()}")
def test_major(b, major):
    assert major_of(b) == major


@given(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 5), st.data())
def test_fp4_round_trip(others, pairs, data):
    count = torch.Size(others).numel() * 2 * pairs
    flat = data.draw(st.lists(st.integers(0, 15), min_size=count, max_size=count))
    codes = torch.tensor(flat, dtype=torch.uint8).view(*others, 2 * pairs)
    packed = pack_fp4(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (*others, pairs)
    assert packed.flatten().tolist() == [low + 16 * high for low, high in zip(flat[::2], flat[1::2])]
    assert torch.equal(unpack_fp4(packed), codes)


def test_all_bytes_by_hand():
    packed = torch.arange(256, dtype=torch.uint8)
    expected = [int(digit, 16) for byte in range(256) for digit in reversed(f"{byte:02x}")]
    assert unpack_fp4(packed).tolist() == expected
    assert unpack_fp4(packed.view(torch.float4_e2m1fn_x2)).tolist() == expected


def test_pairs_lie_along_the_last_dimension():
    codes = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.uint8)
    assert pack_fp4(codes).tolist() == [[0x21, 0x43], [0x65, 0x87]]
    assert pack_fp4(codes.T).tolist() == [[0x51], [0x62], [0x73], [0x84]]      # a view with other strides


@pytest.mark.parametrize("call, parts", [
    (lambda: as_rank3(torch.zeros(3)), ["x has shape (3,)", "(M, K)"]),
    (lambda: as_rank3(torch.zeros(3, 4, 1)), ["x has shape (3, 4, 1)", "(M, K)"]),
    (lambda: dense_b(torch.zeros(3, 4)), ["weight has shape (3, 4)", "(L, N, K)", "torch.stack"]),
    (lambda: dense_b(torch.zeros(2, 4, 3).transpose(1, 2)), ["(12, 1, 3)", "step 3 along K", "contiguous()", "'n'"]),
    (lambda: major_of(torch.zeros(3)), ["b has shape (3,)", "(N, K)"]),
    (lambda: major_of(torch.zeros(8, 8)[::2, ::2]), ["(16, 2)", "neither N nor K", "contiguous()"]),
    (lambda: pack_fp4(torch.zeros(2, 4)), ["torch.float32", "torch.uint8", "dglu.quant.encode"]),
    (lambda: pack_fp4(torch.zeros(2, 5, dtype=torch.uint8)), ["shape (2, 5)", "K even", "zero code"]),
    (lambda: pack_fp4(torch.tensor(1, dtype=torch.uint8)), ["shape ()", "K even"]),
    (lambda: pack_fp4(torch.tensor([1, 16], dtype=torch.uint8)), ["holds 16", "at most 15", "already packed"]),
    (lambda: unpack_fp4(torch.zeros(2, 4, dtype=torch.int8)), ["torch.int8", "torch.uint8", "float4_e2m1fn_x2"]),
    (lambda: unpack_fp4(torch.zeros(2, 4).to(torch.float8_e4m3fn)), ["torch.float8_e4m3fn", "torch.uint8"]),
])
def test_a_bad_argument_is_named(call, parts):
    with pytest.raises(ValueError) as error: call()
    assert all(part in str(error.value) for part in parts), str(error.value)
