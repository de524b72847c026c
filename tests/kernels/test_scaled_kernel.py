"""The SM100 block-scaled kernels under the emulator: pairs of choices, a random sample, adversarial orders, the edges of the formats, and bytes beside the reference's."""
import itertools
import random
from dataclasses import replace

import pytest

pytest.importorskip("cutlass")
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dglu import host
from dglu.check import MXFP4, MXFP8, NVFP4, col_codes, execute, judge, random_case, run_case, untouchable, variants
from dglu.contract import FP8, OUTPUTS
from dglu.emulate import machine
from dglu.quant import encode, format_of
from dglu.truth import Case, make_tensors, memory, numbers, oracle, physical, raw, scale_bytes

FP8_OUTPUTS = ("d_col", "sfd", "dbias")
FORMATS = {"e4m3": replace(MXFP8[0], outputs=FP8_OUTPUTS), "e5m2": replace(MXFP8[1], outputs=FP8_OUTPUTS), "mxfp4": MXFP4[0], "mxfp4x16": MXFP4[1], "nvfp4": NVFP4[0]}
INF, NAN = torch.inf, torch.nan


def changed(case: Case, **changes) -> Case:
    "A case with other fields, of its own or of its configuration."
    return variants(case, changes)[0]


def passes(case, seed=0):
    "A case against float64: every output, poisoned before, within its tolerance; no stray byte."
    result = run_case(case, "emulate", seed)
    assert result.ok, f"{case.name}: {result.message}"


def ran(case, change=None, seed=0, backend="emulate"):
    "The tensors of a case after a run; `change` edits the inputs first."
    t = make_tensors(case, seed)
    if change: change(t)
    execute(case, t, backend)
    return t


def holds(case, change, seed=0):
    "As `passes`, on inputs that `change` has edited; the tensors after the run."
    t = make_tensors(case, seed)
    change(t)
    truth, kept = oracle(case, t), [(what, x, x.clone()) for what, x in untouchable(case, t)]
    execute(case, t, "emulate")
    failed = {key: pair for key, pair in judge(case, t, truth).items() if not pair[0] <= pair[1]}
    assert not failed, f"{case.name}: {failed}"
    assert all(torch.equal(x, before) for _, x, before in kept)
    return t


def stored(case, t, key):
    "An output as a matrix: scale factors as their bytes, anything else as float64."
    end = case.ends[-1]
    if key == "sfd_row": return scale_bytes(t[key], end, case.columns // case.config.sf_vec_size)
    if key == "sfd_col": return col_codes(case, t[key], case.columns)
    return numbers(t[key]).flatten(1) if key in ("dbias", "amax") else numbers(t[key])[:end, :, 0]


# Combinations ----------------------------------------------------------------------------------------------------------

AXES = {"act": {"swiglu": {}, "geglu": dict(act_func="dgeglu"), "situ": dict(act_func="dsituglu")},
        "format": FORMATS,
        "weights": dict.fromkeys(("dense", "discrete")),
        "major": dict.fromkeys("kn"),
        "schedule": {"static": False, "dynamic": True},
        "outputs": dict.fromkeys(("least", "usual", "all")),
        "tile": {"pair": {}, "single": dict(mma_tiler_mn=(128, 256)), "wide": dict(cluster_shape_mn=(2, 2))}}


def legal(row: dict) -> bool:  # FP4 is K-major
    return row["major"] == "k" or row["format"] in ("e4m3", "e5m2")


def pairs(row: dict) -> set: return set(itertools.combinations(row.items(), 2))


def few_rows() -> list:
    "Rows of choices, taken greedily until every legal pair of two choices has occurred."
    rows = [row for row in (dict(zip(AXES, names)) for names in itertools.product(*AXES.values())) if legal(row)]
    random.Random(0).shuffle(rows)  # so that rows with the same first choices are not neighbours
    left, chosen = set().union(*map(pairs, rows)), []
    while left:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & left)))
        left -= pairs(chosen[-1])
    return chosen


ROWS = few_rows()
TYPES_OF_C = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float8_e5m2, torch.float16)


def of_row(i: int) -> Case:
    "The case of a row, which also has its turn's type of C, and in one of three no prob; three experts, one without rows, and a tail in N and in K."
    row = ROWS[i]
    base, everything = FORMATS[row["format"]], row["outputs"] == "all"
    if base.ab in FP8: outputs = {"least": ("dbias",), "usual": ("d_col", "sfd"), "all": ("d_col", "sfd", "dbias")}[row["outputs"]]
    else: outputs = {"least": (), "usual": ("amax",), "all": ("d_col", "amax", "dbias")}[row["outputs"]]
    return changed(base, **AXES["act"][row["act"]], **AXES["tile"][row["tile"]], weights=row["weights"], b_major=row["major"],
                   use_dynamic_sched=AXES["schedule"][row["schedule"]], outputs=outputs, discrete_col_sfd=everything and base.ab in FP8,
                   activation=torch.bfloat16 if everything else None, c=TYPES_OF_C[i % 5], prob=i % 3 != 2, counts=(100, 0, 30), n=96)


@pytest.mark.parametrize("i", [pytest.param(i, marks=pytest.mark.slow) if i % 2 else i for i in range(len(ROWS))],
                         ids=["-".join(row.values()) for row in ROWS])
def test_every_pair_of_choices(i):
    passes(of_row(i), seed=1)


@pytest.mark.slow
@settings(max_examples=3, phases=(Phase.explicit, Phase.generate))  # a case is its seed: nothing to shrink
@given(st.integers(0, 2**32 - 1))
def test_random(seed):
    rng = random.Random(seed)
    case = random_case(rng)
    while case.family != "blockscaled": case = random_case(rng)
    passes(case, seed % 1000)


# Orders ----------------------------------------------------------------------------------------------------------------

# Several tiles for each persistent CTA, the second of 32 columns: both accumulators, and the columns that they share.
BOTH_WAYS = changed(FORMATS["e4m3"], counts=(300, 200), n=288, k=144, discrete_col_sfd=True, outputs=FP8_OUTPUTS)
MULTICAST = changed(FORMATS["nvfp4"], counts=(200,), n=544, k=288, weights="discrete", use_dynamic_sched=True, mma_tiler_mn=(128, 256),
                    cluster_shape_mn=(1, 2))


@pytest.fixture
def fresh_grid():
    "The number of resident clusters is remembered; a machine with few SMs needs its own."
    host.resident_clusters.cache_clear()
    yield
    host.resident_clusters.cache_clear()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
@pytest.mark.parametrize("case, ctas", [(BOTH_WAYS, (2, 1)), (MULTICAST, (4, 2))], ids=["both-ways", "multicast"])
def test_adversarial_order(case, ctas, seed, fresh_grid):
    with machine(order="adversarial", seed=seed, sms=2) as m:  # one cluster at a time: work goes round every ring
        passes(case, seed)
    grid = next(grid for name, grid, *_ in m.launches if "GroupedGemm" in name)
    # Static: one cluster for the four to eight tiles. Dynamic: a cluster in the grid for each tile, handed to the few that run.
    assert grid[:2] == ctas


@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4", "nvfp4"])
def test_few_clusters_take_many_tiles(fmt, fresh_grid):
    "A persistent pair that goes through several experts and tiles, some of them with a few steps only."
    with machine(sms=2) as m:
        passes(changed(FORMATS[fmt], counts=(256, 0, 300, 1), n=288))
    assert next(grid for name, grid, *_ in m.launches if "GroupedGemm" in name)[0] == 2


# Edges: a test goes through all that shares a kernel, which takes seconds to compile ----------------------------------

SMALL = {fmt: changed(case, counts=(200,)) for fmt, case in FORMATS.items()}
QUANTISED = SMALL["e4m3"]
NORMS = (2.0**-8, 0.5, 1.0, 3.7, 256.0)
EXTREME_NORMS = (2.0**-149, 1e-40, 2.0**-126, 2.0**127, 3e38)  # subnormal numbers, and those whose 1/S needs two factors


def test_norm_const():
    for norm in (*NORMS, *EXTREME_NORMS): passes(replace(QUANTISED, norm_const=norm))


def test_zero_blocks():
    "Blocks of rows and blocks of columns without a number: scale 0 and zeros, never 0·inf, beside blocks that are not."
    def change(t):
        raw(t["a"])[32:64].zero_()      # 32 rows of R
        raw(t["b"])[5].zero_()          # a column of R
        t["c"][:, 96:128] = 0           # up: with it, dgate of the second block of gate
    busy = torch.arange(256) % 17 != 3                # rows whose prob is not 0
    for norm in (1.0, 3.7, 256.0, 2.0**127):
        case = replace(QUANTISED, norm_const=norm)
        t = holds(case, change)
        row, col = stored(case, t, "sfd_row"), stored(case, t, "sfd_col")
        assert not row[32:64].any() and not row[:, 2].any() and not col[1].any() and not col[:, (5, 37)].any() and not col[:, 64:96].any()
        assert row[:32][busy[:32], :2].all() and col[2, :5].all()


# Blocks of zeros in every warp, beside ordinary ones whose codes are in the same word
ALONE = {"dgate": lambda t: t["c"][:, 32:64].zero_(), "dup": lambda t: t["c"][:, :32].zero_(),
         "an even column": lambda t: raw(t["b"])[6].zero_(), "an odd column": lambda t: raw(t["b"])[5].zero_()}


@pytest.mark.parametrize("name", ALONE)
def test_one_code_of_a_word_takes_its_warp_the_rare_way(name):
    def change(t):
        t["prob"].fill_(0.75)
        ALONE[name](t)
    t = holds(replace(QUANTISED, norm_const=3.7), change)  # the ordinary way would multiply 0 by infinity or NaN
    row, col = (stored(QUANTISED, t, key) == 0 for key in ("sfd_row", "sfd_col"))
    if name in ("dgate", "dup"): assert row[:, int(name == "dup")].all() and row.sum() == 256
    else: assert not row.any() and col.all(0).nonzero().flatten().tolist() == ([6, 38] if "even" in name else [5, 37]) and col.sum() == 16


def test_zero_experts_of_fp4():
    "A whole expert of zeros: amax is 0."
    t = holds(replace(FORMATS["nvfp4"], counts=(200, 40)), lambda t: raw(t["a"])[256:].zero_())
    assert t["amax"][0].all() and not t["amax"][1].any() and not t["dbias"][1].any()


def put(key, where, value):
    "An edit of one element."
    def change(t): t[key][where] = torch.tensor(value).to(t[key].dtype)
    return change


def special_set(x): return torch.stack([x.isnan(), x == INF, x == -INF])


def agree_outside(case, one, two, outside: dict):
    "Bytes of two runs are the same where `outside` is true."
    for key, mask in outside.items():
        x, y = (stored(case, t, key).nan_to_num(-1e30) for t in (one, two))
        assert torch.equal(x[mask], y[mask]), key


ROW = 70  # of the special element: in the third block of 32


def outside_of(columns: range) -> dict:
    "What the row ROW and its columns of D leave alone, in blocks of 32 both ways."
    row, col = torch.ones(256, 128, dtype=torch.bool), torch.ones(256, 128, dtype=torch.bool)
    for c in columns: row[ROW, c // 32 * 32:c // 32 * 32 + 32], col[64:96, c] = False, False
    return {"d_row": row, "d_col": col, "sfd_row": row[:, ::32], "sfd_col": col[::32]}


def beside(case, change):
    "What the kernel and the reference make of changed inputs, after a check that NaN and infinities are in the same places; and the kernel's plain run."
    kernel, reference, plain = ran(case, change), ran(case, change, backend="reference"), ran(case)
    for key in (k for k in OUTPUTS if k in kernel):
        assert torch.equal(*(special_set(stored(case, t, key).double()) for t in (kernel, reference))), key
    return kernel, reference, plain


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("outputs", [FP8_OUTPUTS, ("d_col",)], ids=["scaled", "cast"])
def test_special_a(fmt, outputs):
    "A row of R: NaN or saturated; what is not its block is what it was."
    for value in (NAN, INF, -INF) if fmt == "e5m2" else (NAN,): special_a(replace(SMALL[fmt], outputs=outputs), value)


def special_a(case, value):
    kernel, reference, plain = beside(case, put("a", (ROW, 3), value))
    outside = {key: mask for key, mask in outside_of(range(128)).items() if key in kernel}
    agree_outside(case, kernel, plain, outside)
    for key in ("sfd_row", "sfd_col") if "sfd" in case.outputs else ():
        x, y = (stored(case, t, key) for t in (kernel, reference))
        assert torch.equal(x[~outside[key]], y[~outside[key]]) and (x[~outside[key]] == (255 if value != value else 254)).all()


GATE, UP = 5, 37  # a column of C, and the one of up that belongs to it
# A column of C, a value there, and the columns of D that it reaches. Left out: an infinite gate of SwiGLU, and one of minus infinity of GeGLU. There the
# formulas have 0·inf; the reference takes the limit, and the kernel does not.
SPECIAL_C = {"dswiglu": [(GATE, NAN, (GATE, UP)), *((UP, v, (GATE,)) for v in (NAN, INF, -INF))],
             "dgeglu": [(GATE, NAN, (GATE, UP)), (GATE, INF, (GATE, UP)), *((UP, v, (GATE, UP)) for v in (NAN, INF, -INF))],
             "dsituglu": [(at, v, (GATE, UP)) for at in (GATE, UP) for v in (NAN, INF, -INF)]}


@pytest.mark.slow
@pytest.mark.parametrize("fmt, act", [*(("e4m3", act) for act in SPECIAL_C), ("nvfp4", "dswiglu"), ("nvfp4", "dsituglu")])
def test_special_c(fmt, act):
    "One element of C: NaN and infinities where the truth and the reference have them, and nothing else changes."
    for at, value, reached in SPECIAL_C[act]: special_c(changed(SMALL[fmt], act_func=act), at, value, reached)


def special_c(case, at, value, reached):
    holds(case, put("c", (ROW, at), value))
    kernel, reference, plain = beside(case, put("c", (ROW, at), value))
    if "sfd" in case.outputs:
        agree_outside(case, kernel, plain, outside_of(reached))
        for key in ("sfd_row", "sfd_col"):
            x, y = (stored(case, t, key) for t in (kernel, reference))
            assert torch.equal(x == 255, y == 255) and (value == value) == (not (x == 255).any())
    else:
        one = torch.ones(256, 128, dtype=torch.bool)
        for c in reached: one[ROW, c] = False
        agree_outside(case, kernel, plain, {"d_row": one})


def scales_of(a=None, b=None):
    "Scale bytes of rows 32 to 39 of A and of all of B; E8M0: the rest of A then makes up for B."
    def change(t):
        if b is not None:
            raw(physical(t["sfb"]))[:] = b
            if t["sfa"].dtype == torch.float8_e8m0fnu: raw(physical(t["sfa"]))[:] = 254 - b
        if a is not None: raw(physical(t["sfa"]))[0, 0, :, :8, 1, :] = a
    return change


E8M0_SCALES = [(0x00, None), (0x01, None), (0x7E, None), (0x7F, None), (0xFE, 0x00), (0xFF, None), (0x00, 0xEE), (0x00, 0x00)]
E4M3_SCALES = [(0x00, None), (0x01, None), (0x08, None), (0x7E, None), (0x7F, None), (0x01, 0x01), (0x7E, 0x7E)]  # 0, subnormal, normal; 448; NaN


@pytest.mark.parametrize("fmt", FORMATS)
def test_scale_bytes(fmt):
    "The ends of both scale formats, against float64; a NaN scale spoils its rows and no others."
    case = SMALL[fmt]
    for a, b in E4M3_SCALES if fmt == "nvfp4" else E8M0_SCALES:
        lost = stored(case, holds(case, scales_of(a, b)), "d_row").isnan().all(1)
        bad = a == (0x7F if fmt == "nvfp4" else 0xFF)
        assert lost[32:40].tolist() == [bad] * 8 and not lost[:32].any() and not lost[40:].any(), (a, b)


def test_nan_scale_of_b():
    "One column of R, its two of D, and every dprob; rows of D are lost in blocks of 32, columns of D one by one."
    def change(t): raw(physical(t["sfb"]))[0, 0, 0, 7, 0, 1] = 0xFF
    case = QUANTISED
    kernel, _, plain = beside(case, change)
    lost = stored(case, kernel, "d_col").isnan().all(0)
    assert lost.nonzero().flatten().tolist() == [7, 39] and stored(case, kernel, "dprob").isnan().all()
    columns = torch.ones(256, 128, dtype=torch.bool)
    columns[:, lost] = False
    agree_outside(case, kernel, plain, {"d_col": columns, "sfd_col": columns[::32], "d_row": columns & (torch.arange(128) >= 64)})


def padded(case, byte):
    "Fill what a scale-factor tensor has beyond its rows, and beyond its blocks, with a byte."
    def change(t):
        blocks = -(-case.k // case.config.sf_vec_size)
        for key, rows in (("sfa", case.rows), ("sfb", case.n)):
            bytes_ = raw(t[key])  # (32, 4, rest_m, 4, rest_k, L)
            row = torch.arange(128 * bytes_.shape[2]).view(-1, 4, 32).permute(2, 1, 0)[..., None, None, None]
            block = torch.arange(4 * bytes_.shape[4]).view(-1, 4).T[..., None]
            bytes_[((row >= rows) | (block >= blocks)).expand(bytes_.shape)] = byte
    return change


@pytest.mark.parametrize("fmt, table", [("e4m3", {k: 0xFF for k in (16, 48, 96, 128)}), ("mxfp4", {64: 0xFF, 128: 0xFF, 192: 0xFF, 96: 0xFE}),
                                        ("nvfp4", {64: 0x7F, 96: 0x7E})], ids=["e4m3", "mxfp4", "nvfp4"])
def test_padding_of_scales(fmt, table):
    "No byte of the padding counts. A product of FP4 spans 64 elements of K: where K ends inside one, a NaN in the padding would (0·NaN)."
    for k, byte in table.items(): holds(replace(SMALL[fmt], k=k), padded(replace(SMALL[fmt], k=k), byte))


@pytest.mark.parametrize("weights, name", [("dense", "sfb_tensor"), ("discrete", "sfb_ptrs")])
def test_a_nan_where_a_product_reads_past_k_is_refused(weights, name):
    case = replace(SMALL["nvfp4"], k=96, weights=weights)
    t = make_tensors(case, 0)
    raw(t["sfb"] if weights == "dense" else t["sfb_ptrs"].experts[0])[0, 0, 0, 3, 1, 0] = 0x7F  # block 7 of row 0; K has 6
    with pytest.raises(ValueError, match=f"{name} past K = 96"): execute(case, t, "emulate")


def tiny(t):
    "Subnormal FP8 elements, and scale factors whose product takes R below float32's normal numbers."
    for key in "ab": t[key].copy_((t[key].float() * 2.0**-6).to(t[key].dtype))
    raw(physical(t["sfa"]))[:], raw(physical(t["sfb"]))[:] = 0x40, 0x4C  # 2^-63, 2^-51


def test_subnormal_inputs():
    "D below 2^-127·448, whose scale code is 0 or next to it, and D below 2^-126: float32's subnormal numbers count."
    for norm in NORMS:
        case = replace(SMALL["e4m3"], norm_const=norm)
        t = holds(case, tiny)
        codes, d = stored(case, t, "sfd_row"), stored(case, t, "d_row")
        assert (numbers(t["a"]).abs() < 2.0**-6).any() and codes.max() < 32 and d.any()
        if norm <= 0.5: assert (d[:, :32][codes[:, 0] == 0] != 0).any()   # a number under the smallest scale


@pytest.mark.slow
@pytest.mark.parametrize("fmt, vec", [("mxfp4", None), ("e4m3", ())])
def test_subnormal_inputs_without_quantisation(fmt, vec):
    case = SMALL[fmt] if vec is None else replace(SMALL[fmt], outputs=vec)
    holds(case, scales_of(0x01, 0x7F - 4))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_saturation(fmt):
    "D beyond its type's range: the largest number, with its sign. With scales, where the scale code is itself at its end."
    top = torch.finfo(FORMATS[fmt].d).max
    cast = replace(SMALL[fmt], outputs=("d_col",), data="large")
    def large(t): raw(physical(t["sfa"]))[:] = 0x90     # 2^17: R alone is beyond E5M2's range as well
    d = stored(cast, holds(cast, large), "d_row")
    assert (d == top).any() and (d == -top).any() and (d.abs() < top).any()
    scaled = replace(SMALL[fmt], norm_const=top * 2.0**12)
    def huge(t): raw(physical(t["sfa"]))[:] = 0xF0      # 2^113: largest scale times largest element stays below D·norm_const
    t = holds(scaled, huge)
    d, codes = stored(scaled, t, "d_row"), stored(scaled, t, "sfd_row")
    assert (codes == 254).any() and (d == top).any() and (d == -top).any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_sizes(fmt):
    "N of odd multiples of 32; tails of K; experts: none with rows, one alone, the first or the last without."
    for n in (32, 96, 160): passes(replace(FORMATS[fmt], n=n))
    for k in (16, 48, 80, 144) if FORMATS[fmt].ab in FP8 else (32, 96, 160, 288): passes(replace(SMALL[fmt], k=k, n=32))
    for counts in ((0, 0), (256,), (0, 256), (256, 0, 0)): passes(replace(FORMATS[fmt], counts=counts))


@pytest.mark.parametrize("fmt, changes", [("e4m3", {}), ("nvfp4", dict(use_dynamic_sched=True))], ids=["static", "dynamic"])
def test_many_experts_mostly_empty(fmt, changes):
    counts = [0] * 1024
    for expert, rows in ((0, 1), (31, 256), (32, 3), (700, 300), (1023, 17)): counts[expert] = rows
    passes(changed(FORMATS[fmt], counts=tuple(counts), n=32, k=32, **changes))


@pytest.mark.slow
def test_many_discrete_experts():
    passes(changed(FORMATS["mxfp4"], counts=(*[0] * 62, 20, 0, 5), n=32, k=32, weights="discrete"))


OTHERS = {
    "single group": changed(QUANTISED, counts=(512,), use_single_group_runtime_offsets=True, discrete_col_sfd=True),
    "single group, FP4, dynamic": changed(SMALL["mxfp4"], counts=(512,), use_single_group_runtime_offsets=True, use_dynamic_sched=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_forms(name):
    passes(OTHERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("act", ["dswiglu", "dgeglu", "dsituglu"])
def test_worst_approximations(act):
    "ex2 and rcp at the edge of what the PTX ISA promises."
    for data in ("normal", "codes"):
        with machine(approx="worst"):
            passes(changed(QUANTISED, act_func=act, data=data))


# Bytes -----------------------------------------------------------------------------------------------------------------

def outputs_in_order(case, seed):
    "Every output of a case's problem 0, bytes and all, in an order of its own."
    with machine(order="adversarial", seed=seed):
        t = ran(case)
    return {key: memory(t[key]) for key in OUTPUTS if key in t}


def test_deterministic():
    "The same bytes in any order; without the flag only dprob may differ: dbias has its fixed order always."
    for deterministic, loose in ((True, ()), (False, ("dprob",))):
        case = changed(QUANTISED, n=288, deterministic=deterministic)   # two tiles of N add to each dprob
        first, second = (outputs_in_order(case, seed) for seed in range(2))
        assert all(torch.equal(first[key], second[key]) for key in first if key not in loose)


# Parameters, gates and ups (as beta leaves them) at which each activation's slopes are exact, in float64 too: σ is 1/2 at 0 and 1 from 64 on,
# the gate's tanh is 0 at 0 and 1 from 16 on, up's, a quotient of polynomials, 0 at 0 with a slope of 1.
EXACT = {"dswiglu": ({}, (0.0, 256.0), (-3.0, -1.0, 0.0, 1.0, 2.0)),
         "dgeglu": (dict(geglu_alpha=1.0, glu_clamp_max=64.0, glu_clamp_min=-2.0), (0.0, 64.0, 72.0), (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0)),
         "dsituglu": ({}, (0.0, 1024.0), (0.0,))}



def signed(codes):
    "FP8 bytes as integers in the order of their numbers, both zeros alike."
    return torch.where(codes < 128, codes, 128 - codes)


def compare_bytes(case, kernel, reference, truth):
    """Both round the same numbers, each within `truth.bound` of it, by the same steps: float32 → (·norm/S) → FP8. So their scale codes may differ only
    where the interval of a block's largest magnitude holds a power of two, and their elements only where the interval holds a rounding boundary. The
    ends of an interval are rounded here by the library's own `encode`; everywhere else both must have that byte."""
    fmt, vec, norm = format_of(case.d), case.config.sf_vec_size, case.norm_const
    counts = {}
    for key, dim in (("row", 1), ("col", 0)):
        q = [raw(t[f"d_{key}"])[:case.ends[-1], :, 0].int() for t in (kernel, reference)]
        codes = [stored(case, t, f"sfd_{key}").int() for t in (kernel, reference)]
        size, spread = (x.unflatten(dim, (-1, vec)) for x in (truth.value.abs(), truth.bound))
        slack = 2.0**-22                                       # two float32 products, each way, on the way to a code
        peaks = [(size + sign * spread).clamp(0).amax(dim + 1) * norm / fmt.max * (1 + sign * slack) for sign in (-1, 1)]
        low, high = (encode(x, format_of(torch.float8_e8m0fnu)).int() for x in peaks)
        assert all(((low <= c) & (c <= high)).all() for c in codes)
        counts[f"sfd_{key}"] = (codes[0] != codes[1]).sum().item(), (low != high).sum().item()
        same = (codes[0] == codes[1]).repeat_interleave(vec, dim)
        unit = norm / torch.exp2(codes[0].double() - 127).repeat_interleave(vec, dim)
        low, high = (signed(encode((truth.value + sign * (truth.bound + slack * truth.value.abs())) * unit, fmt).int()) for sign in (-1, 1))
        ours, theirs = map(signed, q)
        assert ((low <= ours) & (ours <= high)).all() and ((low <= theirs) & (theirs <= high))[same].all()
        assert ((ours - theirs).abs() <= 1)[same].all()
        counts[f"d_{key}"] = ((ours != theirs) & same).sum().item(), (low != high).sum().item()
        assert (low != high).double().mean() < 1 / 8           # or the claim would say little
    for key, (differ, may) in counts.items(): assert differ <= may, (key, differ, may)


@pytest.mark.parametrize("fmt, act", [*(("e4m3", act) for act in EXACT), ("e5m2", "dswiglu")])
def test_bytes_beside_the_reference(fmt, act):
    for norm in (1.0, 3.7):
        case = changed(SMALL[fmt], act_func=act, norm_const=norm, counts=(200, 100))
        truth = oracle(case, make_tensors(case, 3))["d"]
        compare_bytes(case, ran(case, seed=3), ran(case, seed=3, backend="reference"), truth)


def picked(gen, shape, *values): return torch.tensor(values)[torch.randint(len(values), shape, generator=gen)]


def exact_inputs(case):
    "Small integers, and powers of two for everything that scales them."
    _, gates, ups = EXACT[case.config.act_func]
    def change(t):
        gen = torch.Generator().manual_seed(5)
        for key in "ab":
            shape = t[key].shape
            if case.ab in FP8: t[key].copy_(picked(gen, shape, -1.0, 0.0, 1.0).to(case.ab))
            else: raw(t[key]).copy_(picked(gen, shape, *(x | y << 4 for x in (0, 2, 10) for y in (0, 2, 10))))  # E2M1 codes of 0, 1 and -1
        one, two = (0x7F, 0x80) if case.sf == torch.float8_e8m0fnu else (0x38, 0x40)
        for key in ("sfa", "sfb"): raw(t[key]).copy_(picked(gen, t[key].shape, one, two))
        gate, up = picked(gen, (case.rows, case.n // 32, 32), *gates), picked(gen, (case.rows, case.n // 32, 32), *ups)
        t["c"].copy_(torch.stack([gate, up], 2).view(case.rows, -1, 1))
        t["alpha"].copy_(picked(gen, t["alpha"].shape, 1.0, -2.0, 0.5))
        t["beta"].copy_(picked(gen, t["beta"].shape, 1.0, 0.5))
        t["prob"].copy_(picked(gen, t["prob"].shape, 0.0, 0.5, 1.0, 2.0))
        t["dprob"].fill_(1.0)
    return change


def last_bit(x):
    "The value of the lowest set bit of float64 numbers; infinite for 0."
    mantissa, exponent = torch.frexp(x)
    whole = (mantissa * 2.0**53).long().abs()
    return torch.where(x == 0, INF, torch.ldexp((whole & -whole).double(), exponent - 53))


@pytest.mark.parametrize("fmt, act", [*(("e4m3", act) for act in EXACT), ("e5m2", "dswiglu"), ("mxfp4", "dswiglu"), ("nvfp4", "dsituglu")])
def test_exact_arithmetic_gives_the_references_bytes(fmt, act):
    "Where float32 rounds nothing before the outputs' own rounding, every byte is the reference's, in any order of additions."
    for norm in (1.0, 3.7) if fmt == "e4m3" else (1.0,): exact_bytes(SMALL[fmt], act, norm)


def exact_bytes(case, act, norm):
    case = changed(case, act_func=act, norm_const=norm, counts=(200, 100), **EXACT[act][0])
    t = make_tensors(case)
    exact_inputs(case)(t)
    truth = oracle(case, t)
    for d in truth["d"].value.split(256):      # an expert's rows: their sum is exact in any order
        assert d.any() and (d.abs().sum(0) < 2**24 * last_bit(d).amin(0)).all()
    assert (truth["dprob"].value.float().double() == truth["dprob"].value).all()
    kernel, reference = ran(case, exact_inputs(case)), ran(case, exact_inputs(case), backend="reference")
    for key in (k for k in OUTPUTS if k in kernel):
        assert torch.equal(*(memory(t[key]) for t in (kernel, reference))), key
