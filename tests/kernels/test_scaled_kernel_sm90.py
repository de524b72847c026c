"The Hopper kernel on block-scaled operands under the emulator, in a process of its own: CuTe DSL is set to one chip a process."
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")
pytestmark = pytest.mark.slow  # the Hopper kernel's page runs two such cases in two orders, and tests/gpu all of them on a GPU

CASES = '''
from dataclasses import replace
import torch
from dglu.check import MXFP4, MXFP8, NVFP4, run_case, variants
from dglu.emulate import machine

def changed(case, **changes): return variants(case, changes)[0]
E4, E5, MX4, MX4X16, NV4 = *MXFP8[:2], *MXFP4, *NVFP4
BOTH = ("d_col", "sfd", "dbias")
QUANTISED = replace(E4, outputs=BOTH)
cases = [  # what the Hopper kernel does otherwise than Blackwell's: operands made BF16 first, rows in groups of 64, blocks of columns across two warps
    changed(QUANTISED, counts=(200, 0, 300), n=96, discrete_col_sfd=True),
    changed(QUANTISED, norm_const=2.0**127, counts=(30,)),                        # factors in two parts; same kernel as the next
    changed(QUANTISED, data="nan", counts=(200,)),
    changed(E5, act_func="dgeglu", weights="discrete", b_major="n", k=80),
    changed(E4, act_func="dsituglu", b_major="n", k=48, n=32, c=torch.float8_e4m3fn, outputs=("d_col", "dbias"), data="codes"),
    changed(E4, data="zeros", weights="discrete", activation=torch.bfloat16, prob=False),
    changed(MX4, act_func="dgeglu", n=288, k=32),
    changed(MX4X16, k=288, d=torch.float32, outputs=("dbias",), c=torch.float32),
    changed(NV4, weights="discrete", k=160, outputs=("amax", "dbias", "d_col"), deterministic=True),
    changed(NV4, act_func="dsituglu", ab=torch.float4_e2m1fn_x2, epilogue_op="srelu", c=torch.float8_e5m2),
    changed(E5, counts=(512,), use_single_group_runtime_offsets=True),
]
'''
RUN = CASES + '''
import sys
first, every = map(int, sys.argv[1:])
for case in cases[first::every]:
    with machine("sm_90a") as m: result = run_case(case, "emulate", 2)
    assert result.ok, f"{case.name}: {result.message}"
    names = " ".join(name for name, *_ in m.launches)
    assert "dglu_sm90" in names and "equantise" in names, names
print("ok")
'''
ORDERS = CASES + '''
from dglu import host
case = changed(QUANTISED, counts=(200, 60), n=96, k=48, discrete_col_sfd=True)
for seed in range(2):
    host.resident_clusters.cache_clear()
    with machine("sm_90a", order="adversarial", seed=seed, sms=2): result = run_case(case, "emulate", seed)
    assert result.ok, f"{case.name}: {result.message}"
print("ok")
'''


def alone(script: str, *args):
    "A script's words, from a process for Hopper."
    env = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", script, *map(str, args)], capture_output=True, text=True, env=env)
    assert run.returncode == 0 and run.stdout.strip() == "ok", run.stdout + run.stderr


@pytest.mark.parametrize("part", range(2))  # a process each, so that two workers share them
def test_cases(part):
    alone(RUN, part, 2)


def test_adversarial_orders():
    alone(ORDERS)
