"""Placeholder that raises ImportError if the native core has not been built; a compiled module is found first.

It also gives import checkers, which only read sources, a module to resolve imports of the native core to.
"""

raise ImportError("farpool's native core has not been built: install farpool with pip, as in CONTRIBUTING.md")
