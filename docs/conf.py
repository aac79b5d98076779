"""How Sphinx builds this site: ``make docs``, then open build/docs/index.html."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "farpool"
author = "The farpool developers"
copyright = author
release = version = version_of("farpool")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = "farpool"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Single backquotes in docstrings name parameters, methods and values alike.
default_role = "code"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True, "inherited-members": False, "show-inheritance": False}
autodoc_preserve_defaults = True
