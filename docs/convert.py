"""Turn the notebooks and the hand-written pages into Sphinx sources.

nbdev's directives (`#| export`, `#| hide`, …) are obeyed and taken out, exported cells get a caption and anchors, names
of exported symbols become links, and figures get the alt text of their cell's `#| fig-alt:` line.
"""
from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

from symbols import Symbols, defined_names, is_public, relative

DIRECTIVE = re.compile(r"^#\s*\|\s*([\w-]+)\s*:?\s*(.*?)\s*$")
DROPPED = {"hide", "default_exp"}
EXPORTED = {"export", "exports", "exporti"}
TAGS = {"export": "hide-input", "exporti": "hide-input", "code-fold": "hide-input",
        "hide_input": "remove-input", "hide_output": "remove-output"}


@dataclass(frozen=True)
class Notebook:
    path: str                       # "nbs/spec/00_layout.ipynb"
    docname: str                    # "spec/00_layout"
    cells: tuple[dict, ...]
    title: str                      # first heading
    summary: str                    # the quotation under it
    module: str | None              # "dglu.layout"

    @property
    def part(self) -> str:
        "The folder: spec, kernels, …; empty for the index."
        return self.docname.rpartition("/")[0]


def directives(source: str) -> tuple[dict[str, str], str]:
    "The `#| name: value` lines at the head of a cell as a dict, and the rest of the cell."
    lines, found = source.splitlines(), {}
    while lines and (match := DIRECTIVE.match(lines[0])):
        found[match[1]] = match[2]
        del lines[0]
    return found, "\n".join(lines).strip("\n")


def read_notebook(path: Path, root: Path) -> Notebook:
    "Read a notebook: its place in the site, title, summary and module."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        cell["source"] = "".join(cell["source"])
    markdown = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    title = re.search(r"^# (.+)$", markdown, re.M)
    if not title:
        raise ValueError(f"{path.relative_to(root)} has no title. Begin its first cell with '# Title'")
    summary = re.search(r"\A\s*^> (.+)$", markdown[title.end():], re.M)
    found = (directives(cell["source"])[0].get("default_exp") for cell in cells)
    name = next(filter(None, found), None)
    return Notebook(
        path=path.relative_to(root).as_posix(),
        docname=path.relative_to(root / "nbs").with_suffix("").as_posix(),
        cells=tuple(cells),
        title=title[1].strip(),
        summary=summary[1].strip() if summary else "",
        module=f"dglu.{name}" if name else None,
    )


def read_notebooks(root: Path) -> list[Notebook]:
    "All notebooks in the order of their numbers, which is the order in which they build on one another."
    paths = (root / "nbs").rglob("*.ipynb")
    seen = [read_notebook(p, root) for p in paths if not any(part[0] in "._" for part in p.relative_to(root).parts)]
    return sorted(seen, key=lambda nb: (nb.docname.rpartition("/")[2], nb.docname))


def exported(cell: dict) -> list[str]:
    "Names that an exported cell defines."
    found, code = directives(cell["source"])
    return defined_names(ast.parse(code).body) if EXPORTED & set(found) else []


def find_symbols(notebooks: list[Notebook], modules: set[str]) -> Symbols:
    "The table of all exported names, for links."
    symbols = Symbols(modules=modules)
    for nb in notebooks:
        for cell in nb.cells if nb.module in modules else ():
            if cell["cell_type"] == "code":
                for name in filter(is_public, exported(cell)):
                    symbols.pages.setdefault(f"{nb.module}.{name}", nb.docname)
    return symbols


def site_links(markdown: str) -> str:
    "Links that work in the repository (to notebooks and pages by their paths) as links that work in the site."
    markdown = re.sub(r"\]\((?:\.\./)+(?:nbs/)?((?:\w+/)?\w+\.ipynb)", r"](/\1", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*nbs/([\w/]+\.ipynb)", r"](/\1", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*(?:docs/)?pages/(\w+\.md)", r"](/guides/\1", markdown)
    outside = r"(?<!!)\[([^\]]+)\]\((?:\.\./)+((?:[\w.-]+/)*[\w-]+\.(?:md|py|ini|toml|txt)|LICENSE)\)"
    return re.sub(outside, r"\1 (`\2` in the repository)", markdown)


def code_cells(cell: dict, nb: Notebook, symbols: Symbols, where: str) -> list[dict]:
    "A code cell of the notebook as cells of the site: none if it is hidden, two if it needs a caption."
    found, code = directives(cell["source"])
    if DROPPED & set(found) or not code.strip():
        return []
    tags = [tag for name, tag in TAGS.items() if name in found]
    tags += ["remove-input"] if found.get("echo") == "false" else []
    tags += ["remove-output"] if found.get("output") == "false" else []
    metadata: dict = {"tags": tags}
    images = [o for o in cell["outputs"] if any(mime.startswith("image/") for mime in o.get("data", {}))]
    if images and not found.get("fig-alt"):
        raise ValueError(f"{where} shows a figure without alt text. Begin the cell with '#| fig-alt: what it shows'")
    if images:
        metadata["mystnb"] = {"image": {"alt": found["fig-alt"]}}
    out = []
    if EXPORTED & set(found) and nb.module:
        tags.append("exported")
        out.append(markdown_cell(caption(exported(cell), nb, symbols)))
    return [*out, {**cell, "source": code, "metadata": metadata, "execution_count": None}]


def caption(names: list[str], nb: Notebook, symbols: Symbols) -> str:
    "The line over an exported cell: where it goes, with an anchor and an API link for each public name."
    known = [name for name in names if symbols.pages.get(f"{nb.module}.{name}") == nb.docname]
    anchors = "".join(f'<span id="{nb.module}.{name}"></span>' for name in known)
    page = relative(f"reference/{nb.module}", nb.docname)
    links = {name: f'<a href="{page}#{nb.module}.{name}"><code>{name}</code></a>' for name in known}
    listed = ", ".join(links.get(name, f"<code>{name}</code>") for name in names if "." not in name)
    return f'<p class="exported-note">{anchors}exported to <code>{nb.module}</code>: {listed or "imports"}</p>'


def source_line(nb: Notebook, symbols: Symbols) -> str:
    "The line under a page's title: the notebook, the module it exports, and ways to the API page and the source."
    parts = [f"Notebook <code>{nb.path}</code>"]
    if nb.module in symbols.modules:
        api = relative(f"reference/{nb.module}", nb.docname)
        source = relative("_modules/" + nb.module.replace(".", "/"), nb.docname)
        parts += [f'exports <code>{nb.module}</code>: <a href="{api}">API</a>, <a href="{source}">module source</a>']
    return f'<p class="source-line">{" · ".join(parts)}</p>'


def markdown_cell(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def convert(nb: Notebook, symbols: Symbols,
            landing: str = "",      # Markdown to stand under the title in place of the source line (for the index)
            ending: str = "",       # Markdown to stand at the end
            ) -> str:               # the site's notebook, as JSON
    "Obey and remove the directives, and add what the site needs."
    cells, titled = [], False
    for i, cell in enumerate(nb.cells):
        if cell["cell_type"] == "code":
            cells += code_cells(cell, nb, symbols, f"{nb.path}, cell {i},")
            continue
        _, text = directives(cell["source"])
        head = re.search(r"^# .+$\n?(?:\s*^> .+$)?", text, re.M) if not titled else None
        if head:
            titled = True
            cells.append(markdown_cell(f"# {nb.title}"))
            if nb.summary:
                cells.append(markdown_cell("{.summary}\n" + symbols.link(nb.summary, nb.docname, nb.module)))
            cells.append(markdown_cell(landing or source_line(nb, symbols)))
            text = text[head.end():]
        if text.strip():
            cells.append(markdown_cell(symbols.link(site_links(text), nb.docname, nb.module)))
    cells += [markdown_cell(ending)] if ending else []
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, ensure_ascii=False)
