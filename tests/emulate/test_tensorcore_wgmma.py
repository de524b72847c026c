"""wgmma through descriptors that CuTe DSL builds (wgmma_cute.json) equals a float64 product of CuTe's matrices."""
import json
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest
from umma_layout import offsets, read_layout

from dglu.emulate.wgmma import d_fragment, decode_wgmma_desc, wgmma_pieces, wgmma_read, wgmma_write

CASES = json.loads((pathlib.Path(__file__).parent / "wgmma_cute.json").read_text())


def place(code, size, text, base):
    (b, p, s), shape, stride = read_layout(text)
    smem = np.zeros(1 << 17, np.uint8)
    for row, m in enumerate(offsets(shape[0], stride[0])):
        for col, k in enumerate(offsets(shape[1], stride[1])):
            for byte in range(size):
                a = base + (m + k) * size + byte
                a ^= (a >> s) & ((1 << b) - 1) << p
                smem[a] = int(code[row, col]) >> 8 * byte & 255
    return smem


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_tile_equals_a_float64_product(case):
    rng = np.random.default_rng(5)
    m, n, k = case["tile"]
    types = re.search(r"m64n\d+k(\d+)\.f32\.(\w+)\.(\w+)", case["op"])
    step, fmt = int(types[1]), types[2]
    dt = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}[fmt]
    size = np.dtype(dt).itemsize
    a, b = (rng.standard_normal((r, k)).astype(dt) for r in (m, n))
    first = case["calls"][0]
    smem = place(a.view(f"u{size}"), size, case["a"], decode_wgmma_desc(int(first["a"], 16)).start)
    smem |= place(b.view(f"u{size}"), size, case["b"], decode_wgmma_desc(int(first["b"], 16)).start)
    ta, tb = (["MN" if x == "1" else "K" for x in first["rest"][3:5]] if size == 2 else ("K", "K"))
    row, col = d_fragment(n, "f32")
    regs = np.zeros((n // 2, 128), np.uint32)
    for i, call in enumerate(case["calls"]):
        p = wgmma_read(smem, int(call["a"], 16), int(call["b"], 16), n, fmt, fmt, a_major=ta, b_major=tb)
        part = np.s_[:, i * step:(i + 1) * step]
        np.testing.assert_array_equal(p, a[part].astype(np.float64) @ b[part].astype(np.float64).T)
        regs = wgmma_write(regs, p, "f32", i > 0)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    got = np.zeros((m, n))
    got[row[:, 0], col[:, 0]] = regs.view(np.float32)
    assert np.abs(got - exact).max() <= len(case["calls"]) * np.abs(exact).max() * 2.0**-24
    pieces = wgmma_pieces(int(first["b"], 16), n, step, 8 * size, tb)
    assert len(set(pieces.tolist())) == n * step * size // 16
