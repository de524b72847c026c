"""TMA loads and reductions agree, byte for byte, with what an H200 did (recorded in tma_h200.json)."""
import json
import pathlib

import numpy as np
import pytest

from dglu.emulate.tma import DataPlaneError, decode_tensor_map, read_global, reduce_bits, tile_plan, write_shared

RECORD = json.loads((pathlib.Path(__file__).parent / "tma_h200.json").read_text())
index = np.arange(1 << 18, dtype=np.int64)
PATTERN = (index * 131 + (index >> 8) * 7 + (index >> 13) * 29).astype(np.uint8)
SPECIAL = np.zeros(64, np.uint32)
SPECIAL[:22] = [
    0,
    0x80000000,
    1,
    0x807FFFFF,
    0x3F800000,
    0x3F800FFF,
    0x3F801000,
    0x3F801001,
    0x3F802FFF,
    0x3F803000,
    0x3F803001,
    0x7F7FFFFF,
    0x7F800000,
    0xFF800000,
    0x7F800001,
    0x7FC00000,
    0x7F7FEFFF,
    0x00801000,
    0x00001000,
    0x00003000,
    0xBF801000,
    0xBF803000,
]


def bits(text):
    return np.frombuffer(bytes.fromhex(text), np.uint8)


@pytest.mark.parametrize("case", [c for c in RECORD["loads"] if c["smem"]], ids=lambda c: c["name"])
def test_load_leaves_the_bytes_that_the_chip_left(case):
    m = decode_tensor_map(bits(case["map"]))
    gmem = SPECIAL.view(np.uint8) if case["name"] in ("tf32", "f32ftz", "tf32ftz") else PATTERN
    *coords, offset, nbytes = case["args"]
    plan = tile_plan(m, coords, offset)
    assert plan.nbytes == nbytes
    smem = np.full(8192, 0xEE, np.uint8)
    write_shared(plan, smem, read_global(plan, gmem, m.address))
    want = np.full(8192, 0xEE, np.uint8)
    want[:len(bits(case["smem"]))] = bits(case["smem"])
    np.testing.assert_array_equal(smem, want)


@pytest.mark.parametrize("case", [c for c in RECORD["loads"] if not c["smem"]], ids=lambda c: c["name"])
def test_a_first_coordinate_that_traps_on_the_chip_is_a_fault(case):
    m = decode_tensor_map(bits(case["map"]))
    with pytest.raises(DataPlaneError, match="first coordinate = .* multiple of 16 bytes"):
        tile_plan(m, case["args"][:3], case["args"][3])


@pytest.mark.parametrize("case", RECORD["reduces"], ids=lambda c: f"{c['op']}-{c['type']}")
def test_reduction_gives_the_bits_that_the_chip_gave(case):
    u = {"f16": "u2", "bf16": "u2", "f64": "u8", "u64": "u8", "s64": "u8"}.get(case["type"], "u4")
    a, b, out = (bits(case[k]).view(u) for k in ("a", "b", "out"))
    np.testing.assert_array_equal(reduce_bits(a, b, case["op"], case["type"]), out)
