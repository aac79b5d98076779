"""Stands in for the native core where that has not been built: the compiled module of this name is found first.

It also gives a checker of imports, which reads sources, a module at which the arrows to the native core end.
"""

raise ImportError("farpool's native core has not been built: install farpool with pip, as in CONTRIBUTING.md")
