"""Patches other libraries: at once if they are imported already, otherwise as soon as the program imports them.

Importing these libraries here would take seconds, and most programs need none of them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["replace", "when_imported"]

Patch = Callable[[Any], None]
"""Function that changes the imported module that it receives."""


def when_imported(name: str, patch: Patch) -> None:
    """Call `patch` with the module `name`: now if the module is imported already, otherwise right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        patch(module)
        return
    if _finder not in sys.meta_path:
        # In front, because the first finder that knows a module ends the search.
        sys.meta_path.insert(0, _finder)
    _finder.pending[name] = patch


def replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the function `name` of a module by ``make(function)``, also in all modules that have imported it.

    Nothing is changed if the module does not define this function itself.
    """
    original = vars(module).get(name)
    if getattr(original, "__module__", None) != module.__name__:
        return
    replacement = make(original)
    for other in list(sys.modules.values()):
        names = getattr(other, "__dict__", {})
        for key in [key for key, value in list(names.items()) if value is original]:
            names[key] = replacement


class _WhenImported(MetaPathFinder):
    """Import hook that passes each pending module to a function right after the import. Other hooks find the modules.

    Attributes
    ----------
    pending : dict of str to callable
        By module name, the function to call with the module after its import.
    """

    def __init__(self) -> None:
        self.pending: dict[str, Patch] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Removed before the search below, which asks this finder, too, and would not end otherwise.
        patch = self.pending.pop(fullname, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.pending[fullname] = patch
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                execute(module)
            except BaseException:
                self.pending[fullname] = patch
                raise
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _WhenImported()
