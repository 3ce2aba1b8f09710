"""Sphinx configuration: ``make docs`` builds with warnings as errors."""

import re
import sys
from pathlib import Path

import pyro_bpq

sys.path.insert(0, str(Path(__file__).parent))
import conf_pages

conf_pages.write_benchmarks()
conf_pages.write_gallery()
conf_pages.copy_tutorials()

project = "pyro_bpq"
author = "The pyro_bpq contributors"
copyright = author
version = release = pyro_bpq.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "mathml",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]
default_role = "code"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_update_mathjax = False
html_math_renderer = "mathml"
# `make tutorials` executes the notebooks; the pages show the outputs that it kept.
nb_execution_mode = "off"

autosummary_generate = True
# A module lists what it defines; the package's own page lists its modules, which are not in __all__.
autosummary_ignore_module_all = True
autosummary_imported_members = False
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Limits"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_static_path = ["_static"]
html_title = f"pyro_bpq {release}"

_SECTION = re.compile(r"[A-Z][a-z ]+:$")
_LIST_ITEM = re.compile(r"([-*]|\d+\.) ")


def _show_equations_as_they_stand(app, what, name, obj, options, lines):
    """Makes indented paragraphs ahead of the first section literal: equations are written in Unicode."""
    body = next((i for i, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    for i in range(body - 1, 1, -1):
        starts = lines[i].startswith(" ") and not lines[i - 1].strip()
        above = next((line for line in reversed(lines[:i]) if line.strip()), " ")
        if starts and not above.startswith(" ") and not above.endswith("::") and not _LIST_ITEM.match(above):
            lines[i:i] = ["::", ""]


# Where the built pages have what the pages of the repository link to.
_BUILT = {
    "../tutorials": "tutorials/index.md",
    "../gallery": "gallery.md",
    "../benchmarks": "benchmarks.md",
    "../CHANGELOG.md": "changelog.md",
}
_PAGES = {
    "Start": "getting_started tutorials/index gallery from_tracegraph",
    "Use": "recipes choosing diagnostics compiled enumeration expected_costs",
    "Understand": "default concepts plates dynamic_structure results glossary paper",
    "Look up": "estimators api extending benchmarks changelog",
}


def _link_to_built_pages(app, docname, source):
    """Pages are plain Markdown that reads well in the repository; the first one gets its table of contents here."""
    text = re.sub(r"\]\(\.\./tutorials/(\w+\.ipynb)\)", r"](tutorials/\1)", source[0])
    for link, built in _BUILT.items():
        text = text.replace(f"]({link})", f"]({built})")
    if docname == "index":
        for caption, pages in _PAGES.items():
            text += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages.split(), "```", ""])
    source[0] = text


def setup(app):
    app.connect("source-read", _link_to_built_pages)
    # Ahead of napoleon, which moves the sections.
    app.connect("autodoc-process-docstring", _show_equations_as_they_stand, priority=100)
