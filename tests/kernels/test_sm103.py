"The SM100 kernel compiled for sm_103a, in a process of its own: CuTe DSL is set to one chip a process."
import os
import subprocess
import sys

SCRIPT = '''
from dglu.emulate import machine, setup
setup("sm_103a")
from cutlass import Int32, Int64
from dglu import host
from dglu.check import judge
from dglu.kernels.dglu_sm100 import CUstream
from dglu.kernels.mainloop_sm100 import Plan
from dglu.kernels.steps import Outputs
from dglu.truth import Case, make_tensors, oracle
case = Case()
t = make_tensors(case, 0)
truth = oracle(case, t)
places = [t[key].data_ptr() if key in t else 0 for key in host.TENSORS] + [0] * len(host.SCRATCH)
args = [Int64(x) for x in places] + [Int32(x) for x in (case.rows, case.n, case.k, len(case.counts), 2)] + [CUstream(0)]
with machine("sm_103a") as chip:
    for x in t.values(): chip.add(x)
    host.build("sm_103a", Plan(), Outputs())(*args)
found = judge(case, t, truth)
assert all(error <= limit for error, limit in found.values()), found
print("ok on", chip.arch)
'''


def test_the_kernel_runs_on_sm_103a():
    env = {k: v for k, v in os.environ.items() if k != "CUTE_DSL_ARCH"}
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert run.returncode == 0 and run.stdout.strip() == "ok on sm_103a", run.stdout + run.stderr
