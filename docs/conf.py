"""Settings of the documentation; `make docs` builds it into docs/_build/html."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import rollwright

sys.path.insert(0, str(Path(__file__).parent))
import notebooks

project = "rollwright"
author = "The rollwright developers"
project_copyright = f"2026, {author}"
release = rollwright.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["reference.css"]
html_title = f"rollwright {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

add_module_names = False
python_maximum_signature_line_length = 100
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute listed by its class is not indexed twice


def skip_foreign(app, what, name, member, skip, options):  # type: ignore[no-untyped-def]
    """Leave out methods that torch or tensordict define: of a module, of a tensorclass."""
    function = member.fget if isinstance(member, property) else inspect.unwrap(member) if callable(member) else None
    defined_in = getattr(function, "__module__", None) or project
    return True if inspect.isroutine(function) and not defined_in.startswith(project) else None


def list_pages_alone(app, page, template, context, doctree):  # type: ignore[no-untyped-def]
    """Keep the classes, hundreds, out of the sidebar of every page; the pages of the reference list them."""
    toctree = context.get("toctree")
    if toctree is not None:
        context["toctree"] = lambda **options: toctree(**{**options, "maxdepth": 1, "collapse": True})


def link_notebook(app, page, template, context, doctree):  # type: ignore[no-untyped-def]
    """Offer the notebook of a page below its title."""
    if page in notebooks.PAGES:
        link = f'<p><a href="notebooks/{page}.ipynb" download>Download this page as a notebook</a></p>'
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{link}", 1)


def write_notebooks(app, error):  # type: ignore[no-untyped-def]
    if error is None and app.builder.format == "html":
        notebooks.write(Path(app.srcdir), Path(app.outdir) / "notebooks")


def setup(app):  # type: ignore[no-untyped-def]
    app.connect("html-page-context", list_pages_alone, priority=400)  # before the theme's own
    app.connect("autodoc-skip-member", skip_foreign)
    app.connect("html-page-context", link_notebook)
    app.connect("build-finished", write_notebooks)
