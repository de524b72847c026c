"""API pages, one a module, read from the sources with `ast`.

Signatures stand as they are written, and the comment beside each parameter (fastcore's docments) becomes its
description. Importing nothing keeps the pages the same on every version of Python and torch.
"""
from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

from symbols import Symbols

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
Parameter = tuple[str, "ast.AST | None", int]   # as written, its node (bare `*` and `/` have none), its last line


class Module:
    "A module's source, and how to say things about it on its page."

    def __init__(self, name: str, text: str):
        self.name, self.text, self.tree = name, text, ast.parse(text)
        self.comments, self.alone = {}, set()       # line -> comment; lines that hold nothing else
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not token.string.startswith("# %%"):      # nbdev's own marks
                self.comments[token.start[0]] = token.string.lstrip("# ").strip()
                self.alone |= {token.start[0]} if token.line.lstrip().startswith("#") else set()

    @property
    def page(self) -> str:
        return f"reference/{self.name}"

    @property
    def notebook(self) -> str | None:
        "Its notebook's page, from the line nbdev writes at the head of a module."
        found = re.search(r"File to edit: .*nbs/(.+)\.ipynb", self.text)
        return found[1] if found else None

    @property
    def summary(self) -> str:
        return (ast.get_docstring(self.tree) or "").strip().partition("\n\n")[0].replace("\n", " ")

    def written(self, node: ast.AST) -> str:
        "The node's source on one line."
        lines = (ast.get_source_segment(self.text, node) or "").splitlines()
        return re.sub(r"\s+", " ", " ".join(line.split("  #")[0].strip() for line in lines))

    def comment(self, first: int, last: int) -> str:
        "The comment lines just above line `first`, and the comment at the end of line `last`."
        start = first
        while start - 1 in self.alone:
            start -= 1
        return " ".join(self.comments[i] for i in (*range(start, first), last) if i in self.comments)


def plain(text: str) -> str:
    "Text in which `code` and $maths$ keep their meaning and other Markdown signs lose it."
    parts = re.split(r"(`[^`]*`|\$[^$]+\$)", text)
    return "".join(p if i % 2 else re.sub(r"([*<\[\]\\])", r"\\\1", p) for i, p in enumerate(parts))


def quoted(value: str) -> str:
    "A directive's option, which is read as YAML, as it stands."
    return "'" + value.replace("'", "''") + "'"


def parameters(mod: Module, args: ast.arguments, skip_first: bool = False) -> list[Parameter]:
    "Each parameter of a signature, in order."
    plain_args = [*args.posonlyargs, *args.args]
    defaults = dict(zip(reversed(plain_args), reversed(args.defaults)))
    defaults |= {a: d for a, d in zip(args.kwonlyargs, args.kw_defaults) if d}

    def one(arg: ast.arg, stars: str = "") -> Parameter:
        note = f": {mod.written(arg.annotation)}" if arg.annotation else ""
        default = defaults.get(arg)
        equals = (" = " if note else "=") + mod.written(default) if default else ""
        return stars + arg.arg + note + equals, arg, (default or arg).end_lineno

    out = [one(a) for a in args.posonlyargs] + ([("/", None, 0)] if args.posonlyargs else [])
    out += [one(a) for a in args.args]
    out = out[1:] if skip_first else out
    if args.vararg or args.kwonlyargs:
        out.append(one(args.vararg, "*") if args.vararg else ("*", None, 0))
    return out + [one(a) for a in args.kwonlyargs] + ([one(args.kwarg, "**")] if args.kwarg else [])


class Writer:
    "Writes a module's page, in MyST Markdown."

    def __init__(self, mod: Module, symbols: Symbols):
        self.mod, self.symbols = mod, symbols

    def say(self, text: str) -> str:
        return self.symbols.link(plain(text), self.mod.page, self.mod.name)

    def doc(self, node: ast.AST, name: str) -> list[str]:
        "A way to the cell that derives it, and the docstring."
        full, text = f"{self.mod.name}.{name}", self.say(ast.get_docstring(node) or "")
        way = []
        if full in self.symbols.pages:
            way = [f'<p class="derivation"><a href="{self.symbols.href(full, self.mod.page)}">[notebook]</a></p>', ""]
        return [*way, *text.splitlines(), ""]

    def fields(self, params: list[Parameter], head: ast.FunctionDef) -> list[str]:
        "`:param x: comment` lines: a comment belongs to the last parameter on its line, or to the returned value."
        owners = {last: (f"param {node.arg}", node.lineno) for _, node, last in params if node}
        if head.returns:
            owners[head.returns.end_lineno] = ("returns", head.returns.end_lineno)
        said = {what: self.mod.comment(last if first == head.lineno else first, last)
                for last, (what, first) in owners.items()}
        return [f":{what}: {self.say(text)}" for what, text in said.items() if text]

    def directive(self, kind: str, signature: str, body: list[str], **options: str) -> list[str]:
        fence = "````" if kind == "class" else "```"
        lines = [f":{name}: " + (quoted(value) if value else "") for name, value in options.items()]
        return [f"{fence}{{py:{kind}}} {signature}", *map(str.rstrip, lines), "", *body, fence, ""]

    def function(self, node: ast.FunctionDef, kind: str = "function", name: str = "") -> list[str]:
        marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
        params = parameters(self.mod, node.args, kind == "method" and "staticmethod" not in marks)
        body = self.doc(node, name or node.name) + self.fields(params, node)
        returned = self.mod.written(node.returns) if node.returns else ""
        if "property" in marks:
            return self.directive("property", node.name, body, **({"type": returned} if returned else {}))
        options = {mark: "" for mark in ("classmethod", "staticmethod") if mark in marks}
        arrow = f" -> {returned}" if returned else ""
        return self.directive(kind, f"{node.name}({', '.join(text for text, *_ in params)}){arrow}", body, **options)

    def klass(self, node: ast.ClassDef) -> list[str]:
        "A class with its methods; the parameters are those of `__init__`, or a dataclass's fields."
        methods = [n for n in node.body if isinstance(n, FUNCTION)]
        init = next((n for n in methods if n.name == "__init__"), None)
        attributes = [n for n in node.body if isinstance(n, ast.AnnAssign) and n.target.id[0] != "_"]
        if init:
            params = parameters(self.mod, init.args, skip_first=True)
            fields = self.fields(params, init)
        else:
            params = [(self.mod.written(n), None, 0) for n in attributes]
            said = {n.target.id: self.mod.comment(n.lineno, n.end_lineno) for n in attributes}
            fields = [f":param {name}: {self.say(text)}" for name, text in said.items() if text]
        body = [*self.doc(node, node.name), *fields, ""]
        for method in methods:
            if method.name[0] != "_" or method.name == "__call__":
                body += self.function(method, "method", f"{node.name}.{method.name}")
        call = f"({', '.join(text for text, *_ in params)})" if params else ""
        return self.directive("class", node.name + call, body)

    def data(self, node: ast.Assign | ast.AnnAssign) -> list[str]:
        "A constant, with its value if that is short."
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        names = [item.id for item in getattr(target, "elts", [target]) if isinstance(item, ast.Name)]
        short = node.value and node.value.lineno == node.value.end_lineno and isinstance(target, ast.Name)
        value = self.mod.written(node.value) if short else ""
        options = {"value": value} if 0 < len(value) <= 72 else {}
        body = [self.say(self.mod.comment(node.lineno, node.end_lineno))]
        return [line for name in names if name[0] != "_" for line in self.directive("data", name, body, **options)]

    def page(self, title: str | None) -> str:
        "The whole page; `title` is its notebook's."
        mod = self.mod
        lines = [f"# {mod.name}", "", *(["{.summary}", self.say(mod.summary), ""] if mod.summary else [])]
        if title:
            href = f"../{mod.notebook}.html"
            lines += [f'<p class="source-line">Derived and checked in <a href="{href}">{title}</a></p>', ""]
        lines += [f"```{{py:module}} {mod.name}", "```", ""]
        for node in mod.tree.body:
            if isinstance(node, FUNCTION) and node.name[0] != "_":
                lines += self.function(node)
            elif isinstance(node, ast.ClassDef) and node.name[0] != "_":
                lines += self.klass(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                lines += self.data(node)
        return "\n".join(lines) + "\n"


def read_modules(root: Path) -> dict[str, Module]:
    "Every module of the package but the private ones, in the order of their notebooks' numbers."
    mods = []
    for path in sorted((root / "dglu").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not parts[-1].startswith("_"):
            mods.append(Module(".".join(parts), path.read_text(encoding="utf-8")))
    mods.sort(key=lambda mod: ((mod.notebook or "~").rpartition("/")[2], mod.name))
    return {mod.name: mod for mod in mods}


def module_table(mods: dict[str, Module], symbols: Symbols) -> str:
    "The reference's first page: the modules with their summaries."
    rows = [f"| [{m.name}]({m.name}.md) | {symbols.link(plain(m.summary), 'reference/index').replace('|', '/')} |"
            for m in mods.values()]
    return "\n".join(["# Modules", "", "| Module | What it holds |", "| --- | --- |", *rows, ""])
