"Promise: every scale lies at the byte that the tensor core reads, pad bytes are zero, and unpacking is the way back."
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dglu.quant import (
    E4M3,
    empty_sf,
    is_sf_strided,
    pack_sf,
    pack_sf_col,
    quantize,
    sf_offset,
    sf_physical,
    sf_shape,
    sf_view,
    unpack_sf,
    unpack_sf_col,
)

SIZES = st.integers(0, 300), st.integers(0, 13)


def scales_of(*shape, seed=0):
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def memory(sf: torch.Tensor) -> list[int]:
    "The bytes in the order of their addresses, read through the storage and not through the library."
    return sf.view(torch.uint8).as_strided((sf.numel(),), (1,), sf.storage_offset()).tolist()


def packed_by_hand(scales: list, rows: int, blocks: int) -> list[int]:
    "One matrix, a scalar double loop; the atom is walked by its own nesting and not by the closed formula."
    rm, rk = -(-rows // 128), -(-blocks // 4)
    out = []
    for m2, k1, m0, m1, k0 in itertools.product(range(rm), range(rk), range(32), range(4), range(4)):
        m, k = 128 * m2 + 32 * m1 + m0, 4 * k1 + k0
        out.append(scales[m][k] if m < rows and k < blocks else 0)
    return out


@pytest.mark.parametrize("row, block, rest_k, byte", [
    (0, 0, 1, 0), (0, 1, 1, 1), (0, 3, 1, 3), (1, 0, 1, 16), (31, 3, 1, 499), (32, 0, 1, 4), (64, 0, 1, 8),
    (96, 0, 1, 12), (127, 3, 1, 511), (0, 4, 2, 512), (0, 7, 2, 515), (128, 0, 2, 1024), (128, 4, 2, 1536),
    (300, 9, 3, 2 * 1536 + 1024 + 12 * 16 + 4 + 1)])
def test_offsets_by_hand(row, block, rest_k, byte):
    assert sf_offset(row, block, rest_k) == byte
    assert sf_offset(torch.tensor(row), torch.tensor(block), rest_k).item() == byte


@pytest.mark.parametrize("rows, k, vec, L, shape", [
    (128, 128, 32, 1, (32, 4, 1, 4, 1, 1)), (129, 129, 32, 1, (32, 4, 2, 4, 2, 1)), (1, 1, 16, 7, (32, 4, 1, 4, 1, 7)),
    (256, 4096, 16, 1, (32, 4, 2, 4, 64, 1)), (0, 64, 32, 1, (32, 4, 0, 4, 1, 1)), (100, 0, 32, 2, (32, 4, 1, 4, 0, 2)),
    (512, 2880, 32, 4, (32, 4, 4, 4, 23, 4))])
def test_shapes_of_the_contract(rows, k, vec, L, shape):
    assert sf_shape(rows, k, vec, L) == shape
    sf = empty_sf(rows, k, vec, L, dtype=torch.float8_e8m0fnu)
    assert sf.shape == shape and sf.dtype == torch.float8_e8m0fnu and is_sf_strided(sf) and not any(memory(sf))
    assert pack_sf(torch.zeros(L, rows, -(-k // vec), dtype=torch.uint8)).shape == shape


@given(rows=SIZES[0], blocks=SIZES[1])
def test_packing_is_the_atom_and_zeros(rows, blocks):
    scales = scales_of(rows, blocks, seed=rows)
    assert memory(pack_sf(scales)) == packed_by_hand(scales.tolist(), rows, blocks)


@given(rows=SIZES[0], blocks=SIZES[1], L=st.integers(1, 3))
def test_unpacking_brings_every_scale_back(rows, blocks, L):
    scales = scales_of(L, rows, blocks)
    sf = pack_sf(scales)
    assert sf.shape == sf_shape(rows, 32 * blocks, 32, L) and is_sf_strided(sf)
    assert torch.equal(unpack_sf(sf, rows, blocks), scales)


def test_formula_and_strides_agree_over_a_whole_tensor():
    sf = sf_view(torch.arange(2 * 3 * 5 * 512).view(2, 3, 5, 32, 4, 4))
    m, k = torch.meshgrid(torch.arange(384), torch.arange(20), indexing="ij")
    for expert in range(2):
        at = sf[m % 32, m // 32 % 4, m // 128, k % 4, k // 4, expert]
        assert torch.equal(at, sf_offset(m, k, 5) + expert * 3 * 5 * 512)
        assert torch.equal(at.flatten().sort().values, torch.arange(7680) + expert * 7680)      # each byte once


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_the_type_stays_and_strided_input_is_fine(dtype):
    scales = scales_of(13, 260).T
    sf = pack_sf(scales.view(dtype))
    assert sf.dtype == dtype and unpack_sf(sf, 260, 13).dtype == dtype
    assert torch.equal(unpack_sf(sf, 260, 13)[0].view(torch.uint8), scales)
    assert torch.equal(sf.view(torch.uint8), pack_sf(scales))


def test_one_expert_of_many():
    scales = scales_of(3, 200, 9)
    sf = pack_sf(scales)
    for e in range(3):
        assert torch.equal(unpack_sf(sf[..., e:e + 1], 200, 9)[0], scales[e])
        assert torch.equal(unpack_sf(sf[..., e][..., None], 200, 9)[0], scales[e])


def test_view_and_physical_are_one_memory():
    physical = scales_of(2, 3, 2, 32, 4, 4)
    view = sf_view(physical)
    assert view.shape == (32, 4, 3, 4, 2, 2) and sf_view(view) is view
    assert view.data_ptr() == physical.data_ptr() == sf_physical(view).data_ptr() == sf_physical(physical).data_ptr()
    assert torch.equal(sf_physical(view), physical) and sf_physical(view).is_contiguous()


@pytest.mark.parametrize("rows, k, L", [(128, 128, 1), (128, 512, 1), (512, 128, 1), (128, 128, 3), (512, 512, 3)])
def test_only_strides_of_dimensions_longer_than_one_matter(rows, k, L):
    sf = empty_sf(rows, k, 32, L, dtype=torch.uint8)
    odd = [77 if n == 1 else stride for n, stride in zip(sf.shape, sf.stride())]
    assert is_sf_strided(torch.empty_strided(sf.shape, odd, device="meta"))
    for i, n in enumerate(sf.shape):
        if n > 1:
            wrong = [s + (i == j) for j, s in enumerate(sf.stride())]
            assert not is_sf_strided(torch.empty_strided(sf.shape, wrong, device="meta"))


@pytest.mark.parametrize("shape", [(32, 4, 2, 4, 1, 1), (32, 4, 1, 4, 2, 1), (32, 4, 1, 4, 1, 2), (32, 4, 2, 4, 2, 2),
                                   (2, 3, 4, 32, 4, 4), (256, 8), (32, 4, 2, 4, 2), (0,)])
def test_contiguous_tensors_are_not_the_view(shape):
    assert not is_sf_strided(torch.zeros(shape))


def test_one_atom_is_contiguous_either_way():
    assert is_sf_strided(torch.zeros(32, 4, 1, 4, 1, 1))


def test_an_empty_tensor_has_no_wrong_strides():
    assert is_sf_strided(torch.zeros(32, 4, 0, 4, 2, 1)) and is_sf_strided(torch.zeros(32, 4, 2, 4, 0, 1))


@given(rows=st.lists(st.integers(0, 3), min_size=1, max_size=4), spare=st.integers(0, 70), cols=st.integers(1, 140),
       vec=st.sampled_from([16, 32]), as_tensor=st.booleans())
def test_discrete_columns_hold_each_expert_as_if_alone(rows, spare, cols, vec, as_tensor):
    ends = list(itertools.accumulate(256 * n for n in rows))
    blocks = -(-(ends[-1] + spare) // vec)
    scales, offsets = scales_of(blocks, cols), torch.tensor(ends, dtype=torch.int32) if as_tensor else ends
    sf = pack_sf_col(scales, offsets, sf_vec_size=vec, discrete=True)
    assert sf.shape == sf_shape(cols, blocks * vec, vec) and is_sf_strided(sf)
    want, cuts = [], [0, *(end // vec for end in ends), blocks]
    for a, b in zip(cuts, cuts[1:]): want += packed_by_hand(scales[a:b].T.tolist(), cols, b - a)
    assert memory(sf) == want
    assert torch.equal(unpack_sf_col(sf, blocks, cols, offsets, sf_vec_size=vec, discrete=True), scales)


def test_the_end_of_the_tensor_itself_needs_no_alignment():
    scales = scales_of(19, 140)                                                  # 600 rows in blocks of 32
    sf = pack_sf_col(scales, [256, 600], sf_vec_size=32, discrete=True)
    want = packed_by_hand(scales[:8].T.tolist(), 140, 8) + packed_by_hand(scales[8:].T.tolist(), 140, 11)
    assert memory(sf) == want
    assert torch.equal(unpack_sf_col(sf, 19, 140, [256, 600], sf_vec_size=32, discrete=True), scales)


@pytest.mark.parametrize("vec", [16, 32])
def test_an_expert_starts_at_its_byte(vec):
    ends, cols = [256, 256, 1024, 1280], 300
    scales = scales_of(1280 // vec, cols)
    bytes_ = memory(pack_sf_col(scales, ends, sf_vec_size=vec, discrete=True))
    for start, end in zip([0, *ends], ends):
        before, own = start // vec, (end - start) // vec
        for block, column in ((0, 0), (own - 1, cols - 1), (own // 2, 130)) if own else ():
            byte = 512 * 3 * before // 4 + sf_offset(column, block, own // 4)
            assert bytes_[byte] == scales[before + block, column]


def test_plain_columns_are_the_transposed_matrix():
    scales = scales_of(16, 200)
    sf = pack_sf_col(scales, sf_vec_size=32)
    assert memory(sf) == packed_by_hand(scales.T.tolist(), 200, 16)
    assert torch.equal(unpack_sf_col(sf, 16, 200, sf_vec_size=32), scales)
    assert torch.equal(pack_sf_col(scales, [512], sf_vec_size=32, discrete=True), sf)          # one expert: the same


def test_scales_of_both_directions_pack_as_the_contract_shapes_them():
    x = torch.randn(512, 192, generator=torch.Generator().manual_seed(1))
    for dim, shape in ((-1, sf_shape(512, 192, 32)), (0, sf_shape(192, 512, 32))):
        _, scales = quantize(x, E4M3, sf_vec_size=32, dim=dim)
        sf = pack_sf(scales) if dim else pack_sf_col(scales, [256, 512], sf_vec_size=32, discrete=True)
        assert sf.shape == shape and sf.dtype == torch.float8_e8m0fnu
        if dim: back = unpack_sf(sf, 512, 6)[0]
        else: back = unpack_sf_col(sf, 16, 192, [256, 512], sf_vec_size=32, discrete=True)
        assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_no_rows_at_all():
    assert pack_sf(torch.zeros(0, 8, dtype=torch.uint8)).shape == (32, 4, 0, 4, 2, 1)
    assert unpack_sf(pack_sf(torch.zeros(0, 8, dtype=torch.uint8)), 0, 8).shape == (1, 0, 8)
    sf = pack_sf_col(torch.zeros(0, 64, dtype=torch.uint8), [0, 0], sf_vec_size=32, discrete=True)
    assert sf.shape == (32, 4, 1, 4, 0, 1)
    assert unpack_sf_col(sf, 0, 64, [0, 0], sf_vec_size=32, discrete=True).shape == (0, 64)
