"""Which names the library exports, read from its sources without importing them.

Nothing here (or in the modules that use it) imports `dglu`, torch or a CUDA package, so the site does not depend on
their versions, and needs none of them.
"""
from __future__ import annotations

import ast
import posixpath
import re
from dataclasses import dataclass, field


def defined_names(body: list[ast.stmt]) -> list[str]:
    "Functions, classes with their methods, and constants that these statements define, in their order."
    names = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.append(node.name)
        elif isinstance(node, ast.ClassDef):
            names += [node.name, *(f"{node.name}.{name}" for name in defined_names(node.body))]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                items = target.elts if isinstance(target, ast.Tuple) else [target]
                names += [item.id for item in items if isinstance(item, ast.Name)]
    return names


def is_public(name: str) -> bool:
    return not re.search(r"(^|\.)_", name)


@dataclass
class Symbols:
    "Where every module and every exported name is explained, and links to them."

    pages: dict[str, str] = field(default_factory=dict)  # "dglu.layout.pad_groups" -> "spec/00_layout"
    modules: set[str] = field(default_factory=set)       # "dglu.layout", …: each has a page under reference/

    def qualify(self,
                name: str,              # as written between backticks: `pad_groups` or `dglu.layout.pad_groups`
                module: str | None,     # the module of the page it is written on: its own names win
                ) -> str | None:        # the full name, or None if it is unknown or two modules have it
        if name in self.modules or name in self.pages:
            return name
        if re.fullmatch(r"dglu\.\w+", name):
            return self.qualify(name[5:], module)       # `dglu.MoEMLP`: the package gives its modules' names
        if module and f"{module}.{name}" in self.pages:
            return f"{module}.{name}"
        found = [full for full in self.pages if full.endswith("." + name) and full[: -len(name) - 1] in self.modules]
        return found[0] if len(found) == 1 else None

    def href(self, full: str, docname: str) -> str:
        "Relative address, seen from the page `docname`, of a full name."
        page, anchor = (f"reference/{full}", "") if full in self.modules else (self.pages[full], "#" + full)
        return relative(page, docname) + anchor

    def link(self,
             markdown: str,
             docname: str,               # the page the text stands on
             module: str | None = None,  # see `qualify`
             ) -> str:                   # the text, with the first mention of each exported name made a link
        seen: set[str] = set()

        def mention(match: re.Match) -> str:
            full = self.qualify(match[1], module)
            if full is None or full in seen:
                return match[0]
            seen.add(full)
            return f'<a class="symbol" href="{self.href(full, docname)}">{match[0]}</a>'

        code_or_heading = r"(^(?:```|~~~|\$\$).*?^(?:```|~~~|\$\$)|^#+ .*?$)"
        parts = re.split(code_or_heading, markdown, flags=re.M | re.S)
        name = r"(?<![\w`\[}])`([A-Za-z_][\w.]*)(?:\(\))?`(?![`\]])"
        return "".join(part if i % 2 else re.sub(name, mention, part) for i, part in enumerate(parts))


def relative(page: str, docname: str) -> str:
    "Relative address of the built page `page`, seen from the page `docname`."
    return posixpath.relpath(page + ".html", posixpath.dirname(docname) or ".")
