"""The kernel that turns block-scaled operands into BF16 numbers, under the emulator: every code with every scale, and shapes of every kind, to the bit."""
import functools
import itertools

import pytest

pytest.importorskip("cutlass")
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float8E5M2, Float8E8M0FNU, Int32, Uint8
from cutlass.cute.runtime import make_ptr

from dglu.emulate import machine
from dglu.kernels.dequantise import Dequantise, exact_scales
from dglu.quant import E2M1, E4M3, E5M2, E8M0, decode, dequantize, pack_sf, sf_physical

FORMATS = {"E4M3": (Float8E4M3FN, E4M3), "E5M2": (Float8E5M2, E5M2), "E2M1": (Float4E2M1FN, E2M1), "E8M0": (Float8E8M0FNU, E8M0)}
TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "E2M1": torch.uint8, "E8M0": torch.float8_e8m0fnu}
FORMS = [f for f in itertools.product(("E4M3", "E5M2", "E2M1"), ("E8M0", "E4M3"), (16, 32), "kn") if f[0] != "E2M1" or f[3] == "k"]
PAD = 0xA5  # in memory that is none of the kernel's business


def pointer(t, dtype, align=16): return make_ptr(dtype, t.data_ptr(), cute.AddressSpace.gmem, assumed_align=align)


@functools.cache
def compiled(*form):
    "The host function of a form; call it and its result inside a machine."
    nowhere = [make_ptr(t, 256, cute.AddressSpace.gmem, assumed_align=a) for t, a in ((Uint8, 16), (Uint8, 16), (BFloat16, 16), (Int32, 4))]
    return cute.compile(Dequantise(*form).launch, *nowhere, *[Int32(256)] * 3, CUstream(0))


def convert(ab, sf, vec, major, q, scales, discrete=False, before=0):
    "BF16 (L, rows, K) and how much the counter rose, from bytes (L, rows, K or K/2) and (L, rows, blocks)."
    experts, rows, k = *q.shape[:2], q.shape[2] * (2 if ab == "E2M1" else 1)
    atoms = sf_physical(pack_sf(scales))
    valid = sf_physical(pack_sf(torch.ones_like(scales)))
    atoms = torch.where(valid == 1, atoms, PAD)
    q = (q if major == "k" else q.mT).contiguous()
    out = torch.full((experts * rows * k + 64,), -3.0, dtype=torch.bfloat16)
    lost, alone = torch.full((3,), before, dtype=torch.int32), [[x[e].clone() for e in range(experts)] for x in (q, atoms)]
    if discrete: q, atoms = [torch.tensor([x.data_ptr() for x in xs]) for xs in alone]
    args = [pointer(q, Uint8), pointer(atoms, Uint8), pointer(out, BFloat16), pointer(lost[1:], Int32, 4), *map(Int32, (rows, k, experts)), CUstream(0)]
    with machine():
        compiled(FORMATS[ab][0], FORMATS[sf][0], vec, major, discrete)(*args)
    assert (out[-64:] == -3.0).all() and lost[0] == lost[2] == before
    out = out[:-64].view((experts, rows, k) if major == "k" else (experts, k, rows))
    return out if major == "k" else out.mT, lost[1].item() - before


def passes(ab, sf, vec, major, q, scales, **options):
    "To the bit against float64, and the count against float64's; the count."
    exact = torch.stack([dequantize(a.view(TORCH[ab]), b.view(TORCH[sf]), sf_vec_size=vec, dtype=torch.float64) for a, b in zip(q, scales)])
    wanted = exact.bfloat16()
    found, lost = convert(ab, sf, vec, major, q, scales, **options)
    assert (found.view(torch.int16) == wanted.view(torch.int16)).logical_or(found.isnan() & wanted.isnan()).all()
    assert lost == ((wanted.double() != exact) & ~exact.isnan()).sum()
    return lost


def as_integer(code, fmt):
    "A finite element as (n, e) with value n·2^e, from its fields; None for an infinity or a NaN."
    m, width = fmt.mantissa_bits, fmt.exponent_bits
    e, n = code >> m & 2**width - 1, code & 2**m - 1
    if fmt is E4M3 and (e, n) == (15, 7) or fmt is E5M2 and e == 31: return None
    return n + 2**m * (e > 0), max(e, 1) - fmt.bias - m


def is_exact(n, e):
    "Whether n·2^e is a finite BF16 number: a multiple of 2^-133 below 2^128 with at most 8 significant bits."
    while n and n % 2 == 0: n, e = n // 2, e + 1
    return n == 0 or n < 256 and e >= -133 and n.bit_length() + e <= 128


@pytest.mark.parametrize("ab, sf, vec, major", FORMS)
def test_every_code_with_every_scale(ab, sf, vec, major):
    "Row r has the scale byte r, and every code (FP4: every pair of codes)."
    codes = torch.arange(256, dtype=torch.uint8)
    k = 512 if ab == "E2M1" else 256
    lost = passes(ab, sf, vec, major, codes.repeat(1, 256, 1), codes[None, :, None].repeat(1, 1, k // vec))
    elements = [as_integer(c, FORMATS[ab][1]) for c in range(2 ** FORMATS[ab][1].bits)]
    scales = [(1, s - 127) for s in range(255)] if sf == "E8M0" else [as_integer(s, E4M3) for s in range(256)]
    pairs = sum(not is_exact(x[0] * s[0], x[1] + s[1]) for x in elements for s in scales if x and s)
    assert lost == pairs * (k // len(elements)) and (lost > 0) == (sf == "E8M0")


@pytest.mark.parametrize("ab, sf, vec, major", FORMS)
def test_codes_in_any_place(ab, sf, vec, major):
    "Shuffled, so that each code comes at every place of a word beside ordinary and special ones, and each scale beside others."
    generator = torch.Generator().manual_seed(vec)
    rows, k = 80, 512 if ab == "E2M1" else 256
    q = torch.randint(256, (1, rows, 256), dtype=torch.uint8, generator=generator)
    if ab != "E2M1": q[:, :, ::64] = torch.tensor([0x7F, 0xFF, 0x7C, 0xFC], dtype=torch.uint8)
    passes(ab, sf, vec, major, q, torch.randint(256, (1, rows, k // vec), dtype=torch.uint8, generator=generator))


def random_case(ab, vec, experts, rows, k):
    return (torch.randint(256, (experts, rows, k // 2 if ab == "E2M1" else k), dtype=torch.uint8),
            torch.randint(256, (experts, rows, -(-k // vec)), dtype=torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("ab, sf, vec, major, discrete", [(*f, d) for f in FORMS for d in (False, True) if not d or f[1:3] in (("E8M0", 32), ("E4M3", 16))])
def test_shapes(ab, sf, vec, major, discrete):
    "Experts, rows that fill no atom and no thread, blocks that fill no atom, a last block that is cut."
    step = 32 if ab == "E2M1" else 16
    sizes = ((1, 1, 1), (3, 37, 5), (2, 131, 9)) if major == "k" else ((1, 16, 1), (3, 48, 5), (2, 144, 9))
    for experts, rows, chunks in sizes[2 * discrete:]:
        passes(ab, sf, vec, major, *random_case(ab, vec, experts, rows, step * chunks), discrete=discrete)


@pytest.mark.slow
def test_many_blocks():
    "More threads than a block has, in a line and across lines."
    for major, rows, k in (("k", 5, 16 * 300), ("k", 700, 16), ("n", 16 * 20, 16 * 30)):
        passes("E4M3", "E8M0", 32, major, *random_case("E4M3", 32, 2, rows, k))


def test_the_counter_is_added_to():
    q, scales = random_case("E5M2", 32, 2, 64, 64)
    assert passes("E5M2", "E8M0", 32, "k", q, scales, before=1000) == passes("E5M2", "E8M0", 32, "n", q, scales) > 0


@pytest.mark.parametrize("major", "kn")
def test_nothing_to_convert(major):
    assert convert("E4M3", "E8M0", 32, major, *random_case("E4M3", 32, 1, 0, 64))[1] == 0


@pytest.mark.parametrize("ab", ["E4M3", "E5M2", "E2M1"])
def test_quantised_data_is_exact(ab):
    "What quantisation of ordinary numbers leaves loses nothing; bounds of the scales that do."
    low, high = exact_scales(FORMATS[ab][1])
    assert decode(torch.tensor([low, high], dtype=torch.uint8), E8M0).log2().tolist() == {"E4M3": [-124, 119], "E5M2": [-117, 112], "E2M1": [-127, 125]}[ab]
    q, _ = random_case(ab, 32, 1, 64, 64)
    assert passes(ab, "E8M0", 32, "k", q, torch.randint(low, high + 1, (1, 64, 2), dtype=torch.uint8)) == 0


@pytest.mark.parametrize("args, words", [((Float4E2M1FN, Float8E8M0FNU, 32, "n"), ("Float4E2M1FN", "along K")), ((Float8E5M2, Float8E8M0FNU, 64), ("vec = 64", "16, 32")),
                                         ((Float8E8M0FNU, Float8E8M0FNU, 32), ("ab = Float8E8M0FNU", "Float8E4M3FN")), ((Float8E5M2, Float8E5M2, 32), ("sf = ",)),
                                         ((Float8E5M2, Float8E8M0FNU, 32, "m"), ("major = 'm'",))])
def test_errors(args, words):
    with pytest.raises(ValueError) as error: Dequantise(*args)
    assert all(word in str(error.value) for word in words)
