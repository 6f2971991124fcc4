"""Sphinx settings. `nox -s docs` builds with warnings as errors."""

project = "Megatron-DeepSpeed, rebuilt"
author = "The project's authors"
copyright = "2026, the project's authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Megatron-DeepSpeed, rebuilt"
exclude_patterns = ["_build"]
autodoc_typehints = "description"
nitpicky = False
