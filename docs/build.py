"""Build the site from the notebooks, the package's sources and docs/pages.

    python docs/build.py            writes docs_site/
    python docs/build.py --check    builds aside, and fails with the list of files in which docs_site/ differs
"""
from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from check_links import problems
from convert import Notebook, convert, find_symbols, read_notebooks, site_links
from reference import Writer, module_table, read_modules

PARTS = {"spec": "Specification", "machine": "Machine", "kernels": "Kernels", "api": "API", "results": "Results"}
UNUSED = ("**/.buildinfo", "objects.inv", "**/*.map", "_static/debug.css", "_static/*.png", "_static/skeleton.css",
          "_static/clipboard.min.js.LICENSE.txt")
SOURCE_MAP = re.compile(r"\s*(/\*# sourceMappingURL=.*?\*/|//# sourceMappingURL=.*)\s*$")


def order_of(page: Path) -> tuple[int, str]:
    "A guide's place: the number after `order:` in its front matter, then its name."
    found = re.search(r"\A---\n(?:.*\n)*?order:\s*(\d+)", page.read_text(encoding="utf-8"))
    return (int(found[1]) if found else 99, page.stem)


def toctree(caption: str, entries: list[str]) -> str:
    return "\n".join([":::{toctree}", ":hidden:", f":caption: {caption}", "", *entries, ":::", ""]) if entries else ""


def contents(notebooks: list[Notebook], guides: list[str]) -> str:
    "The index's hidden tables of contents, from what exists, and the visible list of notebooks."
    named = [*PARTS, *sorted({nb.part for nb in notebooks} - {""})]
    parts = {part: [nb for nb in notebooks if nb.part == part] for part in named}
    trees = [toctree("Guides", guides)]
    trees += [toctree(PARTS.get(part, part.title()), [nb.docname for nb in nbs]) for part, nbs in parts.items()]
    trees.append(toctree("Reference", ["reference/index", "genindex"]))
    listed = ["## The notebooks, in order", ""]
    for part, nbs in parts.items():
        if nbs:
            listed += [f"### {PARTS.get(part, part.title())}", ""]
            listed += [f"- [{nb.title}]({nb.docname}.ipynb)  \n  {nb.summary}".rstrip() for nb in nbs] + [""]
    return "\n".join([*trees, *listed]) if any(parts.values()) else "\n".join(trees)


def write_sources(root: Path, src: Path) -> None:
    "Everything that Sphinx reads."
    notebooks, mods = read_notebooks(root), read_modules(root)
    symbols = find_symbols(notebooks, set(mods))
    pages = sorted((root / "docs/pages").glob("*.md"), key=order_of)
    for folder in {"guides", "reference", *(nb.part for nb in notebooks)}:
        (src / folder).mkdir(parents=True, exist_ok=True)

    shutil.copy(root / "docs/hero.svg", src)
    landing = (root / "docs/landing.md").read_text(encoding="utf-8")
    end = contents(notebooks, [f"guides/{page.stem}" for page in pages])
    for nb in notebooks:
        is_index = nb.docname == "index"
        text = convert(nb, symbols, landing if is_index else "", end if is_index else "")
        (src / f"{nb.docname}.ipynb").write_text(text, encoding="utf-8")
    if not any(nb.docname == "index" for nb in notebooks):
        (src / "index.md").write_text(f"# dglu\n\n{landing}\n{end}", encoding="utf-8")
    for page in pages:
        text = symbols.link(site_links(page.read_text(encoding="utf-8")), f"guides/{page.stem}")
        (src / "guides" / page.name).write_text(text, encoding="utf-8")

    titles = {nb.docname: nb.title for nb in notebooks}
    for mod in mods.values():
        (src / f"{mod.page}.md").write_text(Writer(mod, symbols).page(titles.get(mod.notebook)), encoding="utf-8")
    tree = "\n".join([":::{toctree}", ":hidden:", "", *mods, ":::"]) if mods else ""
    (src / "reference/index.md").write_text(f"{module_table(mods, symbols)}\n{tree}\n", encoding="utf-8")


def prune(site: Path) -> None:
    "Take out what no page uses, and what would differ from one machine to the next."
    for pattern in UNUSED:
        for path in site.glob(pattern):
            path.unlink()
    shutil.rmtree(site / "_sources", ignore_errors=True)
    for path in [*site.rglob("*.css"), *site.rglob("*.js")]:
        text = path.read_text(encoding="utf-8")
        if (short := SOURCE_MAP.sub("\n", text)) != text:
            path.write_text(short, encoding="utf-8")


def run_sphinx(root: Path, src: Path, site: Path, doctrees: Path) -> list[str]:
    "Sphinx's warnings, each with the file that a person would mend."
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    os.environ.update(SOURCE_DATE_EPOCH="0", TZ="UTC", LC_ALL="C.UTF-8")
    warnings = io.StringIO()
    with patch_docutils(root / "docs"), docutils_namespace():
        Sphinx(src, root / "docs", site, doctrees, "html", status=None, warning=warnings).build()
    text = re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue())
    text = re.sub(re.escape(str(src)) + r"/(\S+\.ipynb):?\d*", r"nbs/\1", text)
    text = text.replace(f"{src}/guides", "docs/pages").replace(f"{src}/", "made from the sources: ")
    return text.strip().splitlines()


def build(root: Path, site: Path, work: Path) -> list[str]:
    "Build the site of the checkout `root` into the folder `site`; the lines say what is wrong with it."
    write_sources(root, work / "src")
    faults = run_sphinx(root, work / "src", site, work / "doctrees")
    prune(site)
    return faults or problems(site, forbidden=(f"{root}/", f"{work}/", "/tmp/ipykernel_"))


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def differences(built: dict[str, bytes], kept: dict[str, bytes]) -> list[str]:
    "Readable lines, one for each file in which the two differ."
    lines = [f"missing   {name}" for name in built if name not in kept]
    lines += [f"left over {name}" for name in kept if name not in built]
    return sorted(lines + [f"differs   {name}" for name in built if kept.get(name, built[name]) != built[name]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with docs_site/ instead of writing it")
    args = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    target = root / "docs_site"
    with tempfile.TemporaryDirectory() as work:
        site = Path(work) / "site"
        faults = build(root, site, Path(work))
        if faults:
            raise SystemExit("The site has faults. Mend them in their source:\n  " + "\n  ".join(faults))
        made = files(site)
        if args.check:
            lines = differences(made, files(target))
            if lines:
                raise SystemExit("docs_site/ is not what `python docs/build.py` makes with the versions in "
                                 "constraints.txt. Run it:\n  " + "\n  ".join(lines))
        else:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(site, target)
    size = sum(map(len, made.values())) / 1e6
    print(f"{'docs_site/ is up to date' if args.check else 'wrote docs_site/'}: {len(made)} files, {size:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
