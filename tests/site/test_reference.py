"The API pages say what Python and fastcore say about the same source."
import inspect
import re

import pytest
from build import differences
from fastcore.docments import docments
from reference import Module, Writer
from symbols import Symbols

SOURCE = '''
from dataclasses import dataclass

LIMIT = 32  # columns in a block
NAME = "it's"
TABLE = {
    "a": 1,
}

# %% a mark of nbdev
def pad(x: list,              # (M, K), any dtype
        counts: "list[int]",  # rows per expert, `LIMIT` at most
        /,
        scale: float = 2.0 ** 3,  # a*b*c [rows)
        *extra: int,
        # above the line
        align: int = LIMIT,
        fill=(0, 1),          # value, "quoted # sign"
        **rest) -> tuple[int, int]:  # ends, and rows
    "Pad each group (contract, 'Grouping')."

def one_line(a: int, b: int = 1) -> int:  # their sum
    return a + b

@dataclass(frozen=True)
class Grid:
    "A tile grid."
    rows: int = 128   # tile M
    cols: int = 256   # tile N

    @property
    def area(self) -> int: return self.rows * self.cols

    @staticmethod
    def make(n: int): return Grid(n, n)

    def _private(self): ...
'''
space: dict = {}
exec(SOURCE, space)
SYMBOLS = Symbols({"dglu.sample.LIMIT": "spec/00_sample"}, {"dglu.sample"})
PAGE = Writer(Module("dglu.sample", SOURCE), SYMBOLS).page(None)


@pytest.mark.parametrize("line", [
    "```{py:data} NAME\n:value: '\"it''s\"'\n",
    "```{py:data} LIMIT\n:value: '32'\n\ncolumns in a block\n```",
    "```{py:function} pad(x: list, counts: \"list[int]\", /, scale: float = 2.0 ** 3, *extra: int, align: int = LIMIT, "
    "fill=(0, 1), **rest) -> tuple[int, int]\n",
    "\nPad each group (contract, 'Grouping').\n",
    ":param x: (M, K), any dtype\n",
    ':param counts: rows per expert, '
    '<a class="symbol" href="../spec/00_sample.html#dglu.sample.LIMIT">`LIMIT`</a> at most\n',
    r":param scale: a\*b\*c \[rows)" "\n",
    ":param align: above the line\n",
    ':param fill: value, "quoted # sign"\n',
    ":returns: ends, and rows\n",
    "```{py:function} one_line(a: int, b: int = 1) -> int\n\n\n:returns: their sum\n```",
    "{py:class} Grid(rows: int = 128, cols: int = 256)\n\nA tile grid.\n\n:param rows: tile M\n:param cols: tile N\n",
    "```{py:property} area\n:type: 'int'\n",
    "```{py:method} make(n: int)\n:staticmethod:\n",
])
def test_page(line):
    assert line in PAGE


def test_private_names_and_nbdev_marks_stay_out():
    assert "_private" not in PAGE and "%%" not in PAGE and "TABLE\n:value:" not in PAGE


@pytest.mark.parametrize("name", ["pad", "one_line", "Grid"])
def test_signature_agrees_with_inspect(name):
    written = re.search(rf"py:\w+}} {name}(\(.*)", PAGE)[1]
    there: dict = {}
    exec(f"def f{written}: ...", dict(space), there)
    shape = [(p.name, p.kind, p.default) for p in inspect.signature(there["f"]).parameters.values()]
    assert shape == [(p.name, p.kind, p.default) for p in inspect.signature(space[name]).parameters.values()]


def test_comments_agree_with_fastcore(tmp_path, monkeypatch):
    (tmp_path / "sample_docments.py").write_text(SOURCE.replace("        /,\n", ""))     # fastcore leaves those out
    monkeypatch.syspath_prepend(tmp_path)
    theirs = docments(__import__("sample_docments").pad)
    ours = dict(re.findall(r"^:(?:param )?(\w+): (.+)$", PAGE.split("py:class")[0].split("one_line")[0], re.M))
    ours.pop("value", None)
    plain = {name: re.sub(r"<[^>]+>|\\", "", text) for name, text in ours.items()}
    assert plain == {("returns" if name == "return" else name): text for name, text in theirs.items() if text}


def test_differences_are_readable():
    built = {"a.html": b"1", "b.html": b"2", "c.html": b"3"}
    kept = {"b.html": b"2", "c.html": b"4", "d.html": b"5"}
    assert differences(built, kept) == ["differs   c.html", "left over d.html", "missing   a.html"]
