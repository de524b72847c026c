"""Sphinx configuration of the site. `build.py` calls Sphinx; `convert.py` and `reference.py` make the sources."""
from configparser import ConfigParser
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

root = Path(__file__).parent.parent
settings = ConfigParser(delimiters=["="], interpolation=None)
settings.read(root / "settings.ini", encoding="utf-8")

project = "dglu"
author = settings["DEFAULT"]["author"]
project_copyright = settings["DEFAULT"]["copyright"]
version = release = settings["DEFAULT"]["version"]
language = "en"

extensions = ["myst_nb", "sphinx_copybutton", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_output_stderr = "show"
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
myst_enable_extensions = ["dollarmath", "amsmath", "attrs_block", "attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
myst_dmath_double_inline = True           # $$…$$ within a paragraph is a display, as in Jupyter
myst_links_external_new_tab = False
maximum_signature_line_length = 72
add_module_names = False
toc_object_entries_show_parents = "hide"
viewcode_follow_imported_members = False

# MathJax 3 lies beside the pages, draws with paths (no fonts) and does not load its menu.
mathjax_path = "mathjax/tex-svg-full.js"
mathjax3_config = {"options": {"enableMenu": False}, "svg": {"fontCache": "local"}}

html_theme = "furo"
html_title = "dglu"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False            # summaries are fetched, which a page opened from a file may not do
html_domain_indices = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
copybutton_selector = "div.cell_input div.highlight pre, div.highlight-python pre, div.highlight-bash pre"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2f5d8a", "color-brand-content": "#2f5d8a",
                            "color-brand-visited": "#2f5d8a", "dglu-code-background": "#f4f6f9"},
    "dark_css_variables": {"color-brand-primary": "#8fbbe6", "color-brand-content": "#8fbbe6",
                           "color-brand-visited": "#8fbbe6", "dglu-code-background": "#1e2126"},
}


def find_source(app, modname: str):
    "Viewcode's source of a module, read from the file instead of by an import."
    analyzer = ModuleAnalyzer.for_file(root / (modname.replace(".", "/") + ".py"), modname)
    analyzer.find_tags()
    return analyzer.code, analyzer.tags


def setup(app):
    app.connect("viewcode-find-source", find_source)
