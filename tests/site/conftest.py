"The tests of the site read docs_site/ as it is committed, and the modules in docs/ that build it."
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def site(root: Path) -> Path:
    folder = root / "docs_site"
    assert folder.is_dir(), "docs_site/ is missing: run python docs/build.py"
    return folder
