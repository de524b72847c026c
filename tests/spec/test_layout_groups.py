"Promise: rows of each expert lie at padded offsets, padding is ours to choose, and every token comes back."
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dglu.layout import (
    ROW_ALIGN,
    SF_ATOM_ROWS,
    ceil_div,
    expert_of_row,
    group_bounds,
    group_offsets,
    group_rows,
    pad_groups,
    round_up,
    unpad_groups,
)

COUNTS = st.lists(st.integers(0, 9), max_size=6)
ALIGN = st.integers(1, 8)


def padded_by_hand(tokens: list, counts: list[int], align: int, fill) -> list:
    "The padded buffer, built expert by expert with list operations alone."
    out, tokens = [], list(tokens)
    for count in counts:
        group, tokens = tokens[:count], tokens[count:]
        while len(group) % align: group.append(fill)
        out += group
    return out


@pytest.mark.parametrize("a, b, blocks", [(0, 32, 0), (1, 32, 1), (32, 32, 1), (33, 32, 2), (7, 1, 7)])
def test_ceil_div_and_round_up(a, b, blocks):
    assert (ceil_div(a, b), round_up(a, b)) == (blocks, blocks * b)


def test_an_expert_starts_a_scale_factor_atom():
    assert ROW_ALIGN % SF_ATOM_ROWS == 0


@pytest.mark.parametrize("counts, ends", [
    ([], []),
    ([0], [0]),
    ([0, 0, 0], [0, 0, 0]),
    ([1], [256]),
    ([256], [256]),
    ([257], [512]),
    ([300, 0, 256, 1], [512, 512, 768, 1024]),
    ([0, 5, 0], [0, 256, 256]),
])
def test_offsets_are_the_padded_ends(counts, ends):
    offsets = group_offsets(counts)
    assert offsets.dtype == torch.int32 and offsets.tolist() == ends


@pytest.mark.parametrize("counts", [
    [3, 0, 5], (3, 0, 5), np.array([3, 0, 5]), list(np.array([3, 0, 5])),
    torch.tensor([3, 0, 5]), torch.tensor([3, 0, 5], dtype=torch.int32), torch.tensor([3, 0, 5], dtype=torch.uint8),
], ids=["list", "tuple", "numpy", "numpy scalars", "int64", "int32", "uint8"])
def test_counts_may_be_any_sequence_of_integers(counts):
    assert group_offsets(counts, align=4).tolist() == [4, 4, 12]
    assert group_rows(counts, align=4).tolist() == [0, 1, 2, 4, 5, 6, 7, 8]


@given(COUNTS, ALIGN)
def test_padding_matches_the_list_version(counts, align):
    x = torch.arange(1, sum(counts) + 1)
    padded, offsets = pad_groups(x, counts, align=align, fill=-1)
    assert padded.tolist() == padded_by_hand(x.tolist(), counts, align, -1)
    assert offsets.tolist() == [len(padded_by_hand(range(sum(counts[:g + 1])), counts[:g + 1], align, 0))
                                for g in range(len(counts))]


@given(COUNTS, ALIGN, st.integers(0, 3), st.sampled_from([(), (3,), (2, 1)]))
def test_every_token_comes_back(counts, align, extra, tail):
    x = torch.randn(sum(counts), *tail)
    padded, _ = pad_groups(x, counts, align=align, fill=float("nan"))
    longer = torch.cat([padded, torch.full((extra, *tail), float("nan"))])     # a buffer with rows past the last end
    assert torch.equal(unpad_groups(longer, counts, align=align), x)


@given(COUNTS, ALIGN, st.integers(0, 3))
def test_bounds_rows_and_experts_agree(counts, align, extra):
    offsets = group_offsets(counts, align=align)
    bounds = group_bounds(offsets)
    m = (bounds[-1][1] if bounds else 0) + extra
    owners = [[g for g, (start, stop) in enumerate(bounds) if start <= row < stop] for row in range(m)]
    assert expert_of_row(offsets, m).tolist() == [owner[0] if owner else len(counts) for owner in owners]
    tokens = [start + i for (start, _), count in zip(bounds, counts) for i in range(count)]
    assert group_rows(counts, align=align).tolist() == tokens


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
                                   torch.float4_e2m1fn_x2, torch.uint8, torch.bfloat16, torch.int64])
def test_padding_keeps_every_dtype_bit_for_bit(dtype):
    x = torch.randint(0, 256, (5, 16), dtype=torch.uint8).view(dtype)
    padded, _ = pad_groups(x, [2, 0, 3], align=4)
    assert padded.dtype == dtype and padded.shape == (8, x.shape[1])
    back = unpad_groups(padded, [2, 0, 3], align=4)
    assert back.dtype == dtype and torch.equal(back.view(torch.uint8), x.view(torch.uint8))
    filler = padded.view(torch.uint8)[[2, 3, 7]]
    assert not filler.any()


def test_a_view_with_gaps_is_padded_by_value():
    x = torch.arange(24.0).view(4, 6)[:, ::2]
    assert torch.equal(unpad_groups(pad_groups(x, [1, 3])[0], [1, 3]), x)


def test_gradients_pass_both_ways():
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: pad_groups(t, [2, 0, 3], align=4)[0], x)
    y = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: unpad_groups(t, [2, 0, 3], align=4), y)


def test_no_tokens_at_all_is_a_valid_batch():
    padded, offsets = pad_groups(torch.zeros(0, 7), [0, 0])
    assert padded.shape == (0, 7) and offsets.tolist() == [0, 0]
    assert unpad_groups(padded, [0, 0]).shape == (0, 7)
    assert group_rows([]).dtype == torch.int64 and group_rows([]).shape == (0,)
    assert expert_of_row(group_offsets([]), 3).tolist() == [0, 0, 0]           # L = 0: nobody's rows


@pytest.mark.parametrize("call, parts", [
    (lambda: group_offsets([3, -1]), ["counts[1] = -1", "integer >= 0", "torch.bincount"]),
    (lambda: group_offsets([1.5]), ["counts[0] = 1.5", "integer", "torch.bincount"]),
    (lambda: group_offsets([True, False]), ["counts[0] = True", "torch.bincount"]),
    (lambda: group_offsets(torch.tensor([[1, 2]])), ["counts[0] = [1, 2]", "per expert"]),
    (lambda: group_rows(torch.tensor([1.0])), ["counts[0] = 1.0", "torch.bincount"]),
    (lambda: group_offsets([2**31 - 255]), ["counts add up to 2147483648", "int32", "Split"]),
    (lambda: group_offsets([1], align=0), ["align = 0", "positive", "256"]),
    (lambda: group_rows([1], align=2.0), ["align = 2.0", "positive integer"]),
    (lambda: pad_groups(torch.zeros(3, 2), [1, 1]), ["x has shape (3, 2)", "2 rows", "sorted by expert"]),
    (lambda: pad_groups(torch.tensor(1.0), [1]), ["x has shape ()", "1 rows"]),
    (lambda: pad_groups(torch.zeros(1, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), [1], fill=1.0),
     ["fill = 1.0", "only be filled with 0", "view(torch.uint8)"]),
    (lambda: unpad_groups(torch.zeros(255, 2), [1]), ["y has shape (255, 2)", "256 rows", "counts"]),
    (lambda: group_bounds(torch.tensor([512, 256], dtype=torch.int32)), ["offsets[1] = 256", "512", "group_offsets"]),
    (lambda: group_bounds(torch.tensor([-256], dtype=torch.int32)), ["offsets[0] = -256", "before 0"]),
    (lambda: group_bounds(torch.tensor([256.0])), ["offsets is torch.float32 of shape (1,)", "int32", "group_offsets"]),
    (lambda: group_bounds([256]), ["offsets is [256]", "int32", "group_offsets"]),
    (lambda: expert_of_row(torch.zeros(1, 1, dtype=torch.int32), 4), ["of shape (1, 1)", "(L,)", "group_offsets"]),
])
def test_a_bad_argument_is_named(call, parts):
    with pytest.raises(ValueError) as error: call()
    assert all(part in str(error.value) for part in parts), str(error.value)
