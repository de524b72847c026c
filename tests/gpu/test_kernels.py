"""The kernels on a real GPU: `pytest tests/gpu` on a machine that has one. `dglu bench --gpu --json FILE` runs the cases too, and leaves a report."""
import os

import pytest
import torch

from dglu import api
from dglu.check import CASES, MXFP8, execute, run_case
from dglu.contract import OUTPUTS
from dglu.truth import Case, make_tensors, raw

HERE = torch.cuda.is_available() and next((b for b in ("sm100", "sm90") if api.BACKENDS[b].missing(torch.device("cuda", 0)) is None), None)
OTHER = os.environ.get("CUTE_DSL_ARCH", "") not in ("", {"sm90": "sm_90a"}.get(HERE, "sm_100a"))
pytestmark = [pytest.mark.skipif(not HERE, reason="needs a GPU that one of the kernels runs on (`dglu info`)"),
              pytest.mark.skipif(OTHER, reason="CuTe DSL is set to another chip in this process: run tests/gpu on its own")]


@pytest.mark.parametrize("case", CASES["bf16"] + CASES["blockscaled"], ids=lambda c: c.name)
def test_case(case):
    result = run_case(case, HERE)
    assert result.ok, result.message


@pytest.mark.parametrize("case", [Case(outputs=("dbias",)), MXFP8[0]], ids=lambda c: c.name)
def test_graph_capture_replays_to_the_same_bits(case):
    t = make_tensors(case, 0, "cuda")
    calls = []
    execute(case, t, lambda problem, tensors: calls.append((api.compiled(problem.compile_key, HERE), problem, tensors)))
    run, problem, tensors = calls[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream): run(problem, tensors)  # compiles, and makes the scratch memory of this stream
    torch.cuda.synchronize()
    want = {key: raw(t[key]).clone() for key in OUTPUTS if key in t and key != "dprob"}  # dprob accumulates
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream): run(problem, tensors)
    end = case.ends[-1]
    for key in want: raw(t[key]).fill_(255) if key in ("dbias", "amax") or key.startswith("sfd") else raw(t[key])[:end].fill_(255)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(raw(t[key]), x) for key, x in want.items())
