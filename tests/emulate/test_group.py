"Busy blocks that are written anew must do what they did before: same bytes, same counters, same faults."
import numpy as np
import pytest

import dglu.emulate  # noqa: F401 -- the package before its parts
from dglu.emulate.engine import Engine, device_array, launch_ptx, tally
from dglu.emulate.translate import TIER, Fault

HEAD = (".version 8.8\n.target sm_100a\n.visible .entry k(.param .u64 p_x, .param .u64 p_y)\n{\n.reg .b32 %r<100>; .reg .b64 %rd<40>; .reg .pred %p<9>;\n"
        ".shared .align 16 .b8 area[8192];\n"
        "mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 64, %r0; ld.param.u64 %rd0, [p_x]; ld.param.u64 %rd1, [p_y];\n"
        "mul.wide.u32 %rd2, %r2, 64; add.u64 %rd3, %rd0, %rd2; add.u64 %rd4, %rd1, %rd2; mov.u32 %r3, area; mad.lo.u32 %r4, %r0, 64, %r3;\n")


def random_body(rng, lines: int = 120) -> str:
    "Arithmetic on r20 to r35, copies through shared memory, and guarded instructions, at random."
    body = [f"ld.global.b32 %r{20 + i}, [%rd3+{4 * i}];" for i in range(16)]
    forms = ("add.s32 {d}, {a}, {b};", "mul.lo.s32 {d}, {a}, {b};", "xor.b32 {d}, {a}, {b};", "shl.b32 {d}, {a}, 3;", "fma.rn.f32 {d}, {a}, {b}, {c};",
             "add.rn.f32 {d}, {a}, {b};", "min.s32 {d}, {a}, {b};", "cvt.rn.bf16x2.f32 {d}, {a}, {b};", "mul.rn.bf16x2 {d}, {a}, {b};",
             "setp.lt.s32 %p1, {a}, {b};\n@%p1 mov.b32 {d}, {c};", "mov.b64 %rd9, {{{a}, {b}}};\nadd.u64 %rd9, %rd9, 5;\nmov.b64 {{{d}, {c}}}, %rd9;",
             "st.shared.b32 [%r4+{o}], {a};\nld.shared.b32 {d}, [%r4+{o}];", "shfl.sync.bfly.b32 {d}, {a}, 5, 31, -1;", "@!%p1 add.s32 {d}, {a}, 7;")
    body.append("setp.eq.s32 %p1, %r0, 3;")
    while len(body) < lines:
        form, first, step = str(rng.choice(forms)), int(rng.integers(16)), int(rng.integers(1, 4))
        for i in range(int(rng.integers(1, 9))):                     # some copies, as unrolled loops have them
            d, a, b, c = (f"%r{20 + (first + step * i + j) % 16}" for j in rng.integers(0, 16, 4))
            body.append(form.format(a=a, b=b, c=c, d=d, o=4 * int(rng.integers(16))))
    return "\n".join(body + [f"st.global.b32 [%rd4+{4 * i}], %r{20 + i};" for i in range(16)])


def outcome(text: str, after: int, monkeypatch, order: str):
    "Bytes, instruction counts and memory counters of three launches."
    monkeypatch.setitem(TIER, "after", after)
    x = device_array(np.random.default_rng(5).integers(0, 2**32, 8 * 64 * 16, np.uint32))
    y, e = device_array(np.full(x.size, 0xFFFFFFFF, np.uint32)), Engine(order, races=True)
    for _ in range(3):
        launch_ptx(e, text + f"// after {after}, {order}\n", x, y, grid=8, block=64)
    return y.tobytes(), tally(e)[0], e.bytes, e.banks


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("order", ["eager", "adversarial"])
def test_random_blocks_do_the_same_after_grouping(seed, order, monkeypatch):
    text = HEAD + random_body(np.random.default_rng(seed)) + "\nret;\n}\n"
    plain, grouped = outcome(text, 10**9, monkeypatch, order), outcome(text, 2, monkeypatch, order)
    assert plain[0] == grouped[0]
    if order == "eager":                    # in the other order warps split at random, and what they run in parts counts twice
        assert plain[1:] == grouped[1:]


@pytest.mark.parametrize("after", [10**9, 2])
def test_a_fault_names_its_instruction_after_grouping(after, monkeypatch):
    monkeypatch.setitem(TIER, "after", after)
    loads = "".join(f"\nld.shared.b32 %r{20 + i}, [%r4+{4 * i}];" for i in range(8))
    skip = "".join(f"\nst.shared.b32 [%r4+{4 * i}], %r0;" for i in range(8) if i != 5)
    hole = f"\nsetp.lt.u32 %p1, %r1, 6;\n@!%p1 bra L;\nst.shared.b32 [%r4+20], %r0;\nL:{skip}\nbar.sync 0;{loads}"
    text = HEAD + hole + "".join(f"\nst.global.b32 [%rd4+{4 * i}], %r{20 + i};" for i in range(8)) + f"\nret;\n}}\n// {after}\n"
    line = next(i for i, x in enumerate(text.splitlines(), 1) if x.startswith("ld.shared.b32 %r25"))
    x = device_array(np.zeros(8 * 64 * 16, np.uint32))
    with pytest.raises(Fault, match=f"uninitialised.*ld.shared.b32 at PTX line {line} by warp . of CTA 6"):
        launch_ptx(Engine(), text, x, x.copy(), grid=8, block=64)


def test_a_register_that_was_never_written_is_named_after_grouping(monkeypatch):
    monkeypatch.setitem(TIER, "after", 2)
    write = "".join(f"\nmov.b32 %r{20 + i}, %r0;" for i in range(8) if i != 5)
    body = f"\nsetp.lt.u32 %p1, %r1, 6;\n@!%p1 bra L;\nmov.b32 %r25, %r0;\nL:{write}\nbar.sync 0;" + "".join(
        f"\nadd.s32 %r{40 + i}, %r{20 + i}, 1;" for i in range(8)) + "".join(f"\nst.global.b32 [%rd4+{4 * i}], %r{40 + i};" for i in range(8))
    text = HEAD + body + "\nret;\n}\n// never\n"
    line = next(i for i, x in enumerate(text.splitlines(), 1) if x.startswith("add.s32 %r45"))
    x = device_array(np.zeros(8 * 64 * 16, np.uint32))
    with pytest.raises(Fault, match=f"uninitialised.*PTX line {line} by"):
        launch_ptx(Engine(), text, x, x.copy(), grid=8, block=64)
