"""Sphinx configuration; the pages are Markdown (MyST)."""

from __future__ import annotations

import desugar

project = "desugar"
author = "the desugar authors"
copyright = author
release = version = desugar.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "desugar"

default_role = "literal"
napoleon_use_ivar = True
autodoc_mock_imports = ["transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
nitpicky = False
