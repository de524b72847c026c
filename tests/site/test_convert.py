"The converter obeys nbdev's directives, and adds anchors, links, captions and alt texts."
import json

import convert
import pytest
from symbols import Symbols

PICTURE = [{"output_type": "display_data", "metadata": {}, "data": {"image/png": "AA=="}}]


def code(source: str, outputs: list | None = None) -> dict:
    return {"cell_type": "code", "metadata": {}, "execution_count": 3, "outputs": outputs or [], "source": source}


def text(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def site_cells(tmp_path, *cells: dict, name: str = "spec/00_layout") -> list[dict]:
    path = tmp_path / f"nbs/{name}.ipynb"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"cells": [text("# A question?\n> In short."), code("#| default_exp layout"), *cells]}))
    nb = convert.read_notebook(path, tmp_path)
    symbols = convert.find_symbols([nb], {"dglu.layout"})
    symbols.pages["dglu.quant.encode"] = "spec/02_quant"
    symbols.modules.add("dglu.quant")
    return json.loads(convert.convert(nb, symbols))["cells"][3:]    # past title, summary and source line


@pytest.mark.parametrize("directive", ["#| hide", "#|hide", "#| default_exp layout"])
def test_hidden_cells_go(tmp_path, directive):
    assert site_cells(tmp_path, code(f"{directive}\nx = 1")) == []


@pytest.mark.parametrize("directive, tags", [
    ("", []),
    ("#| eval: false", []),
    ("#| exports", ["exported"]),
    ("#| export", ["hide-input", "exported"]),
    ("#| hide_input", ["remove-input"]),
    ("#| echo: false", ["remove-input"]),
    ("#| output: false", ["remove-output"]),
])
def test_directives_become_tags_and_leave_the_code(tmp_path, directive, tags):
    cell = site_cells(tmp_path, code(f"{directive}\nx = 1"))[-1]
    assert (cell["source"], cell["metadata"]["tags"]) == ("x = 1", tags)


def test_exported_cells_get_a_caption_with_anchors_and_api_links(tmp_path):
    cell = code("#| exports\nclass Grid:\n    def tiles(self): ...\ndef _helper(): ...")
    caption = site_cells(tmp_path, cell)[0]["source"]
    assert '<span id="dglu.layout.Grid"></span>' in caption
    assert '<span id="dglu.layout.Grid.tiles"></span>' in caption
    assert '<a href="../reference/dglu.layout.html#dglu.layout.Grid"><code>Grid</code></a>' in caption
    assert 'id="dglu.layout._helper"' not in caption and "<code>_helper</code>" in caption


def test_a_figure_takes_its_alt_text(tmp_path):
    cell = site_cells(tmp_path, code("#| fig-alt: A line: it rises.\nplot()", PICTURE))[-1]
    assert cell["metadata"]["mystnb"]["image"]["alt"] == "A line: it rises."


def test_a_figure_without_alt_text_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"00_layout.ipynb, cell 2, shows .*Begin the cell with '#\| fig-alt:"):
        site_cells(tmp_path, code("plot()", PICTURE))


def test_title_and_summary(tmp_path):
    path = tmp_path / "nbs/index.ipynb"
    path.parent.mkdir()
    path.write_text(json.dumps({"cells": [text("# dglu\n\n> In short.\n\nMore.")]}))
    nb = convert.read_notebook(path, tmp_path)
    sources = [cell["source"] for cell in json.loads(convert.convert(nb, Symbols(), "LANDING", "END"))["cells"]]
    assert (nb.title, nb.summary, nb.module) == ("dglu", "In short.", None)
    assert sources == ["# dglu", "{.summary}\nIn short.", "LANDING", "\n\nMore.", "END"]


def test_a_notebook_without_title_is_an_error(tmp_path):
    path = tmp_path / "nbs/x.ipynb"
    path.parent.mkdir()
    path.write_text(json.dumps({"cells": [text("no title")]}))
    with pytest.raises(ValueError, match="nbs/x.ipynb has no title"):
        convert.read_notebook(path, tmp_path)


LINK = '<a class="symbol" href="{}">`{}`</a>'


@pytest.mark.parametrize("before, after", [
    ("call `encode`", "call " + LINK.format("02_quant.html#dglu.quant.encode", "encode")),
    ("`dglu.quant.encode()`", LINK.format("02_quant.html#dglu.quant.encode", "dglu.quant.encode()")),
    ("`dglu.encode`", LINK.format("02_quant.html#dglu.quant.encode", "dglu.encode")),
    ("`dglu.quant`", LINK.format("../reference/dglu.quant.html", "dglu.quant")),
    ("`encode` `encode`", LINK.format("02_quant.html#dglu.quant.encode", "encode") + " `encode`"),
    ("`unknown` ``encode`` [`encode`](x.md)", "`unknown` ``encode`` [`encode`](x.md)"),
    ("## `encode`", "## `encode`"),
    ("```\n`encode`\n```", "```\n`encode`\n```"),
])
def test_names_become_links(tmp_path, before, after):
    assert site_cells(tmp_path, text(before))[-1]["source"] == after


def test_a_name_of_two_modules_is_no_link():
    symbols = Symbols({"dglu.a.f": "spec/0", "dglu.b.f": "spec/1"}, {"dglu.a", "dglu.b"})
    assert symbols.qualify("f", None) is None
    assert symbols.qualify("f", "dglu.b") == "dglu.b.f"


@pytest.mark.parametrize("before, after", [
    ("[a](../spec/01_activation.ipynb#clamp)", "[a](/spec/01_activation.ipynb#clamp)"),
    ("[a](../../nbs/spec/01_activation.ipynb)", "[a](/spec/01_activation.ipynb)"),
    ("[a](01_activation.ipynb)", "[a](01_activation.ipynb)"),
    ("[a](nbs/api/30_api.ipynb)", "[a](/api/30_api.ipynb)"),
    ("[a](../../docs/pages/honesty.md#where)", "[a](/guides/honesty.md#where)"),
    ("[a](../CONTRIBUTING.md)", "a (`CONTRIBUTING.md` in the repository)"),
    ("[a](https://example.org/nbs/x.ipynb)", "[a](https://example.org/nbs/x.ipynb)"),
])
def test_repository_links_become_site_links(before, after):
    assert convert.site_links(before) == after
