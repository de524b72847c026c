"""A Hopper GEMM that CuTe DSL compiles for sm_90a, against float64; and the same one with a stage given back too early, and without its fence."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")


def test_gemm_of_a_warpgroup():
    "In a process of its own: CuTe DSL reads the architecture once."
    env = {k: v for k, v in os.environ.items() if k != "CUTE_DSL_ARCH"} | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("kernels_wgmma.py"))], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["race", "missing fence"]
