"Every notebook runs top to bottom, as a counted test of its own."
from pathlib import Path

import pytest
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb as run_notebook

ROOT = Path(__file__).parents[1]
FLAGS = get_config(path=ROOT).tst_flags.split()


@pytest.mark.parametrize("notebook", sorted(nbglob(ROOT / "nbs")), ids=lambda p: str(Path(p).relative_to(ROOT / "nbs")))
def test_notebook_runs(notebook):
    ok, _ = run_notebook(Path(notebook), skip_flags=FLAGS)
    assert ok, "the traceback is on stderr, above"
