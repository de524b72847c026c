"""tcgen05.ld, st and cp move what the layouts of CuTe DSL's copy atoms, and B200 measurements of tcgen05.cp, say."""
import numpy as np
import pytest
from umma_layout import offsets

from dglu.emulate.tma import DataPlaneError
from dglu.emulate.tmem import cp_plan, cp_read, cp_write, ld_map, registers, shift, tmem_ld, tmem_st

# CuTe DSL 4.8.1, `copy_atom.layout_dst_tv` for float32: (thread, value) to the offset in a row-major tile of that width
ATOMS = [
    ("16x64b", 1, 2, ((2, 2, 8), 1), ((16, 1, 2), 1)),
    ("16x64b", 2, 4, ((2, 2, 8), (1, 2)), ((32, 1, 4), (1, 2))),
    ("16x128b", 1, 4, ((4, 8), (1, 2)), ((1, 4), (1, 32))),
    ("16x128b", 2, 8, ((4, 8), (1, 2, 2)), ((1, 8), (1, 64, 4))),
    ("16x256b", 1, 8, ((4, 8), (2, 2)), ((2, 8), (1, 64))),
    ("16x256b", 2, 16, ((4, 8), (2, 2, 2)), ((2, 16), (1, 128, 8))),
    ("32x32b", 4, 4, (32, 4), (4, 1)),
    ("16x32bx2", 1, 2, ((16, 2), 1), ((2, 1), 1)),
    ("16x32bx2", 4, 8, ((16, 2), 4), ((8, 4), 1)),
]


@pytest.mark.parametrize("shape, num, width, tv_shape, tv_stride", ATOMS)
@pytest.mark.parametrize("warp", [0, 3, 5])
def test_load_map_is_the_copy_atoms(shape, num, width, tv_shape, tv_stride, warp):
    lane, col = ld_map(shape, num, warp % 4 * 32 << 16 | 7, warp, split=num)
    thread, value = (np.array(offsets(s, d)) for s, d in zip(tv_shape, tv_stride))
    np.testing.assert_array_equal((lane - warp % 4 * 32) * width + col - 7, value[:, None] + thread[None])


LARGEST = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}


@pytest.mark.parametrize("shape", LARGEST)
@pytest.mark.parametrize("pack", [False, True])
def test_store_then_load_gives_the_registers_back_for_every_size(shape, pack):
    rng = np.random.default_rng(3)
    num = 1
    while num <= LARGEST[shape]:
        tmem = np.zeros((128, 512), np.uint32)
        regs = rng.integers(1, 1 << 32, (registers(shape, num), 32), dtype=np.uint32)
        split = num * (2 if pack else 1)
        tmem_st(tmem, shape, num, 64 << 16, 2, regs, split, pack)
        np.testing.assert_array_equal(tmem_ld(tmem, shape, num, 64 << 16, 2, split, pack), regs)
        used = np.argwhere(tmem)
        assert used[:, 0].min() == 64 and used[:, 0].max() == (95 if shape == "32x32b" else 79)
        assert len(used) <= regs.size * (2 if pack else 1) and (not pack or (tmem >> 16 == 0).all())
        num *= 2


def physical(rows, size):
    "Random rows of `size` bytes in the unswizzled K-major layout: eight rows of 16 bytes, then their next 16."
    data = np.random.default_rng(4).integers(0, 256, (rows, size), dtype=np.uint8)
    smem = np.zeros(8192, np.uint8)
    for r in range(rows):
        for c in range(size // 16):
            at = 0x200 + r // 8 * (size * 8) + c * 128 + r % 8 * 16
            smem[at:at + 16] = data[r, 16 * c:16 * c + 16]
    return smem, data, 1 << 46 | (size * 8 >> 4) << 32 | 8 << 16 | 0x200 >> 4


LANE_OF = {
    ("128x256b", None): lambda r: [r],
    ("128x128b", None): lambda r: [r],
    ("4x256b", None): lambda r: [32 * r],
    ("64x128b", "warpx2::02_13"): lambda r: [r, r + 64],
    ("64x128b", "warpx2::01_23"): lambda r: [r // 32 * 64 + r % 32, r // 32 * 64 + r % 32 + 32],
    ("32x128b", "warpx4"): lambda r: [r, r + 32, r + 64, r + 96],
}


@pytest.mark.parametrize("shape, multicast", LANE_OF)
def test_copy_puts_each_row_in_its_lanes(shape, multicast):
    rows, bits = int(shape.split("x")[0]), int(shape.split("x")[1][:-1])
    smem, data, desc = physical(rows, bits // 8)
    tmem = np.full((128, 512), 0xEEEEEEEE, np.uint32)
    plan = cp_plan(shape, desc, 0x30, multicast)
    cp_write(plan, tmem, cp_read(plan, smem))
    want = np.full((128, 512), 0xEEEEEEEE, np.uint32)
    for r in range(rows):
        for lane in LANE_OF[shape, multicast](r):
            want[lane, 0x30:0x30 + bits // 32] = data[r].view(np.uint32)
    np.testing.assert_array_equal(tmem, want)


@pytest.mark.parametrize("fmt, width, left", [("b4x16_p64", 4, 2), ("b6x16_p32", 6, 0)])
@pytest.mark.parametrize("shape, multicast", [("128x256b", None), ("32x128b", "warpx4")])
def test_decompression_widens_codes_to_bytes(fmt, width, left, shape, multicast):
    rows, size = int(shape.split("x")[0]), int(shape.split("x")[1][:-1]) // 8
    smem, data, desc = physical(rows, size)
    got = cp_read(cp_plan(shape, desc, 0, multicast, fmt), smem).view(np.uint8)
    for r in range(rows):
        for c in range(size // 16):
            number = int.from_bytes(data[r, 16 * c:16 * c + 16].tobytes(), "little")
            codes = [(number >> width * i & (1 << width) - 1) << left for i in range(16)]
            assert got[r, 16 * c:16 * c + 16].tolist() == codes


@pytest.mark.parametrize("call, message", [
    (lambda: ld_map("32x32b", 4, 32 << 16, 0), "lane of the address for warp 0 = 32: must lie in the warp's quarter"),
    (lambda: ld_map("32x32b", 4, 16 << 16, 0), "lane of the address = 16: must be a multiple of 32"),
    (lambda: ld_map("32x32b", 64, 449, 0), "last column = 512: tensor memory has 512"),
    (lambda: ld_map("16x256b", 64, 0, 0), "x = 64: must be a power of two up to 32"),
    (lambda: ld_map("8x8b", 1, 0, 0), "shape = 8x8b: must be one of"),
    (lambda: cp_plan("64x128b", 1 << 46, 0), "must be one of"),
    (lambda: cp_plan("128x128b", 1 << 46, 32 << 16), "lane of the destination = 32: must be 0"),
    (lambda: cp_read(cp_plan("128x128b", 1 << 46 | 8 << 32, 0), np.zeros(1024, np.uint8)), "memory has 1024 bytes"),
    (lambda: shift(None, 0), "tcgen05.shift is not modelled")])
def test_illegal_addresses_and_shapes_are_named(call, message):
    with pytest.raises(DataPlaneError, match=message):
        call()
