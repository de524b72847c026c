"The command line: plain lines, honest exit codes, and no torch before it is needed."
import json
import re
import subprocess
import sys
from importlib.metadata import version
from unittest.mock import patch

import pytest
import torch
from rich.table import Table
from typer.testing import CliRunner

from dglu import api, bench, cli
from dglu.api import BACKENDS, Backend
from dglu.check import CASES, FAULTS
from dglu.demo import DemoResult, Run

MX = "preactivation d=e4m3"  # in the name of one case


def dglu(*args, code=0):
    result = CliRunner().invoke(cli.app, [str(a) for a in args])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture
def forgetful():
    "Backends may be replaced: what the API remembers of them is forgotten, before and after."
    for f in (api.compiled, api.pick_backend): f.cache_clear()
    yield
    for f in (api.compiled, api.pick_backend): f.cache_clear()


def test_import_and_help_load_no_torch():
    code = "import sys, dglu.cli; print(sorted({'torch', 'numpy', 'matplotlib', 'cutlass'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    code = ("import sys; sys.argv = ['dglu', '--help']\nfrom dglu.cli import main\n"
            "try: main()\nfinally: print('torch' in sys.modules)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "False" and all(f"\n  {name} " in out for name in ("demo", "info", "check", "bench"))


@pytest.mark.parametrize("command, options", {
    "demo": ("--steps", "--seed", "--out", "--backend"), "check": ("--backend", "--family", "--seed", "--filter", "--jobs"), "bench": ("--json",), "info": ()}.items())
def test_every_option_is_documented(command, options):
    text = dglu(command, "--help")
    assert all(re.search(rf"{o}\b", text) for o in options)


def test_no_command_prints_the_help():
    result = CliRunner().invoke(cli.app, [])
    assert "Usage" in result.output and result.exit_code in (0, 2)  # typer's releases differ in the code


# info

def test_info_names_versions_devices_and_backends():
    text = dglu("info")
    assert re.search(rf"^torch\s+{re.escape(version('torch'))}\s*$", text, re.M)
    assert re.search(rf"^python\s+{re.escape(sys.version.split()[0])}\s*$", text, re.M)
    assert re.search(r"^cpu\s+\S+, \d+ threads\s+\S", text, re.M)
    assert re.search(r"^reference\s+available\s+on .*cpu\s*$", text, re.M)
    for name in ("dglu", "nvidia-cutlass-dsl", "cuda-python", *BACKENDS): assert re.search(rf"^{name}\s+\S", text, re.M), name


@pytest.mark.parametrize("name, needs", [("sm100", "Blackwell"), ("sm90", "Hopper"), ("emulate", "nvidia-cutlass-dsl")])
def test_info_gives_the_reason_in_one_line(name, needs):
    "Whole, however long: a log has no width."
    reason = BACKENDS[name].missing(torch.device("cpu"))
    if reason is None: pytest.skip(f"{name} runs here")
    if not torch.cuda.is_available(): assert re.search(rf"^{name}\s+not available\s+{re.escape(reason)}\s*$", dglu("info"), re.M)
    assert needs in reason


def test_info_says_what_is_not_installed():
    with patch.object(cli, "version", side_effect=cli.PackageNotFoundError):
        assert re.search(r"^nvidia-cutlass-dsl\s+not installed\s*$", dglu("info"), re.M)


def test_output_is_plain_where_colour_is_asked_for_by_a_variable():
    env = {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "xterm-256color"}
    with patch.dict("os.environ", env): text = dglu("info")
    assert "\x1b" not in text and re.search(r"^sm90\s+.*nvidia-cutlass-dsl\s*$", text, re.M)


# check

def test_check_prints_a_line_a_case_and_a_summary():
    lines = dglu("check", "--family", "dsrelu", "--filter", "preactivation", "--seed", "3").splitlines()
    names = [c.name for c in CASES["dsrelu"] if "preactivation" in c.name]
    assert len(lines) == len(names) + 1 and lines[-1].startswith(f"{len(names)} of {len(names)} cases ok on reference")
    for name, line in zip(names, lines):
        assert line.startswith(f"ok   {name} ") and re.search(r"\d+\.\d ms  d_row \de-\d\d/\de-\d\d", line)


def test_two_jobs_print_what_one_does():
    def verdicts(*more): return [re.sub(r" +[\d.]+ ms|, [\d.]+ s", "", x) for x in dglu("check", "--family", "dsrelu", "--filter", "preactivation", *more).splitlines()]
    assert verdicts("--jobs", "2") == verdicts() and len(verdicts()) > 3


def test_check_without_a_family_filters_all_of_them():
    lines = dglu("check", "--filter", "vector_f32").splitlines()
    assert len(lines) == 1 + sum("vector_f32" in c.name for cases in CASES.values() for c in cases) > 2


def test_a_failing_case_is_named_explained_and_exits_with_1(forgetful):
    wrong = Backend("reference", "", lambda d: None, lambda problem: FAULTS["dprob stored, not added"].run)
    with patch.dict(BACKENDS, reference=wrong): lines = dglu("check", "--filter", MX, code=1).splitlines()
    assert lines[0].startswith("FAIL ") and re.match(r"     dprob .* > ", lines[1]) and lines[2].startswith("0 of 1 cases ok")


def test_a_backend_that_raises_fails_its_case(forgetful):
    def broken(problem, t): raise NotImplementedError("no such tile")
    with patch.dict(BACKENDS, reference=Backend("reference", "", lambda d: None, lambda problem: broken)):
        assert "NotImplementedError: no such tile" in dglu("check", "--filter", MX, code=1)


@pytest.mark.parametrize("arguments, parts", [
    (("check", "--backend", "gpu"), ("backend = 'gpu'", "one of", "'reference'", "dglu info")),
    (("check", "--family", "fp3"), ("family = 'fp3'", "'bf16', 'blockscaled', 'dsrelu'", "Leave it out")),
    (("check", "--filter", "no such"), ("filter = 'no such'", "part of a case's name")),
    (("check", "--family", "dsrelu", "--filter", "dgeglu"), ("filter = 'dgeglu'",)),
    (("demo", "--backend", "gpu"), ("backend = 'gpu'", "one of")),
    (("demo", "--steps", "0"), ("--steps", "1")),
    (("train",), ("train",))])
def test_what_cannot_be_done_exits_with_2_and_says_why(arguments, parts):
    text = dglu(*arguments, code=2)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("command", ["check", "demo"])
def test_a_backend_that_does_not_run_here_exits_with_2(command, forgetful):
    away = Backend("sm100", "a big GPU", lambda d: "it needs a big GPU", None)
    with patch.dict(BACKENDS, sm100=away): text = dglu(command, "--backend", "sm100", code=2)
    assert all(part in text for part in ("backend = 'sm100' cannot run here", "it needs a big GPU", "dglu info")) and "ok" not in text.split()


# demo

def result_of(losses):
    w = torch.tensor([3.0, 4.0])
    return DemoResult(Run("autograd", [5.0, 4.0], {"w1": w * 1.01}, 1.0), Run("dglu", losses, {"w1": w * 1.02}, 2.0), {"w1": w.double()}, "reference")


def test_demo_prints_the_comparison_and_writes_the_picture(tmp_path):
    folder = tmp_path / "a" / "b"
    text = dglu("demo", "--steps", "3", "--seed", "1", "--out", folder)
    assert "Backend of dglu's backward: reference (torch, any device)" in text
    first = re.search(r"^first loss\s+(\d\.\d{4})\s+(\d\.\d{4})\s*$", text, re.M)
    assert first[1] == first[2] and re.search(r"^last loss\s+\d\.\d{4}\s+\d\.\d{4}\s*$", text, re.M)
    assert len(re.findall(r"^\S+\.moe\.(?:w1|w2|b1|router\.weight)(?:\s+\d\.\de[+-]\d\d){3}\s*$", text, re.M)) == 8
    assert f"Picture: {folder / 'losses.png'}" in text and "The two runs coincide" in text
    assert (folder / "losses.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_demo_passes_its_options_on(tmp_path):
    with patch("dglu.demo.run_demo", return_value=result_of([5.0, 4.0])) as run:
        dglu("demo", "--steps", "7", "--seed", "5", "--backend", "reference", "--out", tmp_path)
    given = run.call_args.kwargs
    assert (given["steps"], given["seed"], given["backend"]) == (7, 5, "reference") and callable(given["on_step"])


def test_runs_that_part_exit_with_1_in_words(tmp_path):
    with patch("dglu.demo.run_demo", return_value=result_of([5.0, 3.0])): text = dglu("demo", "--out", tmp_path, code=1)
    assert "do not coincide" in text and "step 1: losses differ by 25.00%" in text and "runs coincide:" not in text
    assert (tmp_path / "losses.png").exists()  # a picture of the fault helps


def test_without_matplotlib_the_demo_says_what_to_install_before_it_trains():
    with patch.object(cli, "find_spec", return_value=None), patch("dglu.demo.run_demo") as run:
        text = dglu("demo", code=2)
    assert "matplotlib is not installed" in text and "pip install 'dglu[demo]'" in text and not run.called


def test_without_the_library_sources_the_demo_says_so():
    with patch("sysconfig.get_path", return_value="/nowhere"): assert "standard library's sources" in dglu("demo", code=2)


# bench

def test_bench_prints_a_table_and_writes_the_numbers(tmp_path):
    path, run = tmp_path / "new" / "b.json", bench.run_bench
    few = {"import dglu": "import dglu"}
    with patch.object(bench, "IMPORTS", few), patch.object(bench, "run_bench", lambda machine: run(machine, runs=1, calls=3, m=512, k=64, n=64, experts=2)):
        text = dglu("bench", "--json", path, "--machine", "a quiet machine")
    numbers = json.loads(path.read_text())
    assert numbers["machine"] == "a quiet machine" and numbers["torch"] == torch.__version__
    for part in ("a quiet machine", "import dglu", "reference", "autograd, backward alone", "× operands", "validation, warm", "< 50 µs"): assert part in text
    assert f"Numbers: {path}" in text


def test_bench_writes_nothing_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with patch.object(bench, "run_bench", lambda machine: {}), patch.object(bench, "table", lambda result: Table()): dglu("bench")
    assert list(tmp_path.iterdir()) == []
