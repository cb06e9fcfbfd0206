"""Settings of the documentation; `make docs` builds it into docs/_build/html."""

from __future__ import annotations

import rollwright

project = "rollwright"
author = "The rollwright developers"
project_copyright = f"2026, {author}"
release = rollwright.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"rollwright {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute listed by its class is not indexed twice
