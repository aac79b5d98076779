"""Placeholder for the native core: importing it raises ImportError if the core has not been built.

If the core has been built, Python finds the compiled module before this file. Import checkers, which read only sources,
resolve imports of the native core to this file.
"""

raise ImportError("farpool's native core has not been built: install farpool with pip, as in CONTRIBUTING.md")
