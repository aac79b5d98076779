"""Lets SGLang be imported without torchvision, whose wheels need another torch; it imports that and does not use it.

Nor does its cache use the parser of reasoning, which the cache's modules import and which needs the package openai.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import ClassVar


class _Name(type):
    """Class of names that are asked of the module, and of theirs."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Anything(metaclass=_Name):
    pass


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision" and name != "sglang.srt.parser.reasoning_parser":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
