"""CuTe layouts as text, evaluated element by element; operands placed in shared memory by them."""
import ast
import itertools
import json
import pathlib
import re

import numpy as np

CASES = json.loads((pathlib.Path(__file__).parent / "umma_cute.json").read_text())


def offsets(shape, stride):
    "All offsets of a CuTe shape:stride pair, first mode fastest (colexicographic)."
    if isinstance(shape, int):
        return [i * stride for i in range(shape)]
    modes = [offsets(s, d) for s, d in zip(shape, stride)]
    return [sum(c) for c in (reversed(p) for p in itertools.product(*reversed(modes)))]


def read_layout(text):
    "'S<b,p,s> o 0 o shape:stride' -> (swizzle, shape, stride)."
    sw, rest = re.fullmatch(r"S<(\d+,\d+,\d+)> o 0 o (.*)", text).groups()
    shape, stride = map(ast.literal_eval, rest.split(":"))
    return tuple(map(int, sw.split(","))), shape, stride


def place(code, bits, text, base):
    "Shared memory with the codes (rows, all k) where CuTe's layout puts them; addresses are swizzled one at a time."
    (b, p, s), shape, stride = read_layout(text)
    mn, k = offsets(shape[0][0], stride[0][0]), offsets(shape[0][1], stride[0][1])
    steps = offsets(shape[2], stride[2])
    smem = np.zeros(1 << 18, np.uint8)
    for row, m in enumerate(mn):
        for col, kk in enumerate(x + y for y in steps for x in k):
            bit = (m + kk) * bits
            for byte in range(max(1, bits // 8)):
                a = base + bit // 8 + byte
                a ^= (a >> s) & ((1 << b) - 1) << p
                smem[a] |= (int(code[row, col]) >> 8 * byte & 255) << bit % 8
    return smem, len(mn), len(k), len(steps)
