"""Descriptors that CuTe DSL 4.8.1 builds name the matrices of CuTe's own layouts (both recorded in umma_cute.json)."""
import numpy as np
import pytest
from umma_layout import CASES, offsets, place, read_layout

from dglu.emulate.operands import decode_instr_desc, decode_smem_desc, operand_bytes, storage_bits


@pytest.mark.parametrize("case", [c for c in CASES if "atmem" not in c["name"]], ids=lambda c: c["name"])
@pytest.mark.parametrize("which", "ab")
def test_gathered_matrix_is_the_one_that_the_layout_describes(case, which):
    first = decode_instr_desc(int(case["calls"][0]["idesc"], 16), case["kind"])
    fmt, major = (first.a_type, first.a_major) if which == "a" else (first.b_type, first.b_major)
    bits = storage_bits(fmt, case["kind"])
    assert bits == case[which + "_bits"]
    _, shape, stride = read_layout(case[which])
    rows = len(offsets(shape[0][0], stride[0][0]))
    total = len(offsets(shape[0][1], stride[0][1])) * len(offsets(shape[2], stride[2]))
    code = np.random.default_rng(1).integers(0, 1 << bits, (rows, total), dtype=np.uint64)
    descs = [decode_smem_desc(int(c[which], 16)) for c in case["calls"]]
    smem, rows, k, steps = place(code, bits, case[which], descs[0].start)
    assert rows * case["cta_group"] == (first.m if which == "a" else first.n) and k == first.k and steps == len(descs)
    for i, d in enumerate(descs):
        raw = operand_bytes(smem, d, major, rows, k, bits)
        got = np.stack([raw & 15, raw >> 4], -1).reshape(rows, k) if bits == 4 else raw.view(f"u{bits // 8}")
        np.testing.assert_array_equal(got, code[:, i * k:(i + 1) * k])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_instruction_descriptor_has_the_shape_of_the_tile(case):
    d = decode_instr_desc(int(case["calls"][0]["idesc"], 16), case["kind"])
    assert str((d.m, d.n, d.k)) == case["shape"] and (d.m, d.n) == tuple(case["tile"][:2])
