"Every notebook runs top to bottom, alone in a fresh Python as a reader's does, as a counted test of its own."
import subprocess
import sys
from pathlib import Path

import pytest
from nbdev.config import get_config
from nbdev.doclinks import nbglob

ROOT = Path(__file__).parents[1]
FLAGS = get_config(path=ROOT).tst_flags.split()
RUN = "import sys; from pathlib import Path; from nbdev.test import test_nb; sys.exit(not test_nb(Path(sys.argv[1]), skip_flags=sys.argv[2:])[0])"


@pytest.mark.parametrize("notebook", sorted(nbglob(ROOT / "nbs")), ids=lambda p: str(Path(p).relative_to(ROOT / "nbs")))
def test_notebook_runs(notebook):
    done = subprocess.run([sys.executable, "-c", RUN, str(notebook), *FLAGS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
