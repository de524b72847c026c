"""Prints what a call costs in Python before anything is launched, in microseconds: `python tests/kernels/host_cost.py`. No test: it measures this machine."""
import os
import timeit
from contextlib import nullcontext

os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")
from dglu import api, host
from dglu.truth import Case, make_tensors

ORDER = ("padded_offsets", "alpha", "beta", "prob", "dprob")


class Nothing:
    "A compiled kernel whose launch does nothing."
    def to(self, device): return self
    def run_compiled_program(self, pointers): pass


def report(what: str, call):
    times = sorted(timeit.repeat(call, number=2000, repeat=7))
    print(f"{what}: {times[3] * 500:.1f} µs a call (median of 7, best {times[0] * 500:.1f})")


if __name__ == "__main__":
    launcher, numbers = host.Launcher(Nothing()), [256] * (len(host.TENSORS) + len(host.SCRATCH) + len(host.SIZES) + 1)
    report("Launcher, 20 arguments", lambda: launcher(*numbers))
    host.kernel, host.emulated, host.resident_clusters = lambda *_: Nothing(), lambda *_: nullcontext(), lambda *_: 74
    t = make_tensors(Case(outputs=("dbias",)))
    vectors = [t[key] for key in ORDER]
    op = api.GroupedGemmDgluSm100(t["a"], t["c"], t["d_row"], None, None, *vectors, t["b"], sample_dbias=t["dbias"], backend="emulate", validate=False)
    op.compile()
    call = lambda: op.execute(t["a"], t["c"], t["d_row"], None, None, *vectors, b_tensor=t["b"], dbias_tensor=t["dbias"])  # noqa: E731
    call()
    report("execute, the same tensors again", call)
    report("execute's kernel part", lambda: op._run(op._last[1], t))
