"Prints what a call costs in Python before anything is launched, in microseconds: `python tests/kernels/host_cost.py`. No test: it measures this machine."
import os
import timeit

os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")
from dglu import host


class Nothing:
    "A compiled kernel whose launch does nothing."
    def to(self, device): return self
    def run_compiled_program(self, pointers): pass


if __name__ == "__main__":
    launcher, numbers = host.Launcher(Nothing()), [256] * (len(host.ADDRESSES) + len(host.SIZES) + 1)
    times = sorted(timeit.repeat(lambda: launcher(*numbers), number=10000, repeat=7))
    print(f"Launcher: {times[3] * 100:.2f} µs a call for {len(numbers)} arguments (median of 7, best {times[0] * 100:.2f})")
