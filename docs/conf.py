"""How Sphinx builds these pages: `python -m sphinx -W -b html docs docs/_build`, with the extra `docs` installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

project = "blobmem"
copyright = "the blobmem authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "plain_docstrings"]
exclude_patterns = ["_build"]
suppress_warnings = ["myst.header"]  # an included part of CONTRIBUTING.md begins with a lower header

html_theme = "furo"
html_title = "blobmem"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

smartquotes = False

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Class attributes", "params_style")]
