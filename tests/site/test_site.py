"The committed site is whole: every notebook, name, picture and link is there, and nothing comes from outside."
import ast
import html
import json
import re
from pathlib import Path

import check_links
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(p.relative_to(ROOT / "nbs").with_suffix("").as_posix() for p in (ROOT / "nbs").rglob("[!.]*.ipynb")
                   if ".ipynb_checkpoints" not in p.parts)
MODULES = sorted(".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "dglu").rglob("[!_]*.py"))


def page_of(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


def cells_of(name: str) -> list[dict]:
    return json.loads((ROOT / "nbs" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def exports(module: str) -> list[str]:
    "The literal `__all__` that nbdev wrote."
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    lists = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"]
    return ast.literal_eval(lists[0]) if lists else []


def test_links_assets_and_alt_texts(site, root):
    assert check_links.problems(site, forbidden=(f"{root}/", "/tmp/ipykernel_")) == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_notebook_has_a_page_with_its_title(site, name):
    lines = "\n".join("".join(cell["source"]) for cell in cells_of(name)).splitlines()
    title = next(line[2:].strip() for line in lines if line.startswith("# "))
    heading = re.search(r"<h1>(.*?)<a class=\"headerlink\"", page_of(site, name), re.S)[1]
    plain = re.sub(r"<[^>]+>", "", heading)
    assert html.unescape(plain).replace("’", "'") == title.replace("`", "")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_figure_has_the_alt_text_of_its_cell(site, name):
    wanted = []
    for cell in cells_of(name):
        source = "".join(cell["source"])
        if re.search(r"^#\s*\|\s*(hide|hide_output)\s*$", source, re.M):
            continue
        pictures = [o for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
        wanted += [re.search(r"fig-alt:\s*(.+?)\s*$", source, re.M)[1] for _ in pictures]
    shown = re.findall(r'<img alt="([^"]*)"[^>]*src="[^"]*_images/[0-9a-f]{64}\.png"', page_of(site, name))
    assert [html.unescape(alt) for alt in shown] == wanted


@pytest.mark.parametrize("module", MODULES)
def test_every_exported_name_is_in_the_reference(site, module):
    page = page_of(site, f"reference/{module}")
    assert [name for name in exports(module) if f'id="{module}.{name}"' not in page] == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_exported_name_has_an_anchor_in_its_notebook(site, name):
    page = page_of(site, name)
    for module in MODULES:
        if f"/nbs/{name}.ipynb." in (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"):
            assert [each for each in exports(module) if f'id="{module}.{each}"' not in page] == []


def test_only_what_a_reader_needs(site):
    names, kinds = ("_sources", ".buildinfo", ".doctrees", "objects.inv"), (".map", ".ipynb", ".py")
    assert [p.name for p in site.rglob("*") if p.name in names or p.suffix in kinds] == []
