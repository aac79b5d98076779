"""Old names of modules that have moved: importing ``farpool.node.process`` gives ``farpool.cluster.node.process``.

Programs and plug-ins written for earlier releases import modules by their old names. An old name gives the same module
object as the new one, so classes and settings are the same objects under both names.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__all__ = ["RENAMED", "install"]

RENAMED = {
    "farpool.cluster.names.session": "farpool.cluster.roles.session",
    "farpool.debug": "farpool.memory.debug",
    "farpool.kv.accelerate": "farpool.kv.engines.accelerate",
    "farpool.kv.lmcache": "farpool.kv.engines.lmcache",
    "farpool.kv.objects": "farpool.abc.objects",
    "farpool.kv.prefix": "farpool.kv.cache",
    "farpool.kv.sglang": "farpool.kv.engines.sglang",
    "farpool.kv.transformers": "farpool.kv.engines.transformers",
    "farpool.kv.transformers_config": "farpool.kv.engines.transformers_config",
    "farpool.kv.transformers_layer": "farpool.kv.engines.transformers_layer",
    "farpool.kv.vllm": "farpool.kv.engines.vllm",
    "farpool.net": "farpool.cluster.wire",
    "farpool.net.fabric": "farpool.abc.fabric",
    "farpool.node": "farpool.cluster.node",
    "farpool.pager": "farpool.memory.pager",
    "farpool.pool": "farpool.memory.pool",
    "farpool.registry": "farpool.cluster.registry",
    "farpool.registry.base": "farpool.abc.registry",
    "farpool.store": "farpool.cluster.store",
    "farpool.store.names": "farpool.cluster.names",
    "farpool.store.names.objects": "farpool.abc.objects",
    "farpool.store.names.session": "farpool.cluster.roles.session",
    "farpool.tape_file": "farpool.memory.tape",
    "farpool.tensors.named": "farpool.cluster.store.tensors",
    "farpool.tiers": "farpool.memory.tiers",
    "farpool.tiers.base": "farpool.abc.tier",
}
"""Maps the old name of each moved package or module to the new one. Modules inside a package moved with the package."""
_FILES = frozenset({"farpool.registry", "farpool.store", "farpool.tiers"})
"""Old names that users may still import. Each is a real file, so that type checkers find it.

The import hook therefore ignores these names, and finds only the modules inside these packages.
"""


def new_name(name: str) -> str | None:
    """Return the present name of a module, or None if `name` is not an old one."""
    head, tail = name, ""
    while head not in RENAMED:
        head, dot, last = head.rpartition(".")
        if not dot:
            return None
        tail = f".{last}{tail}"
    return RENAMED[head] + tail


class _Renamed(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = None if fullname in _FILES else new_name(fullname)
        if name is None:
            return None
        spec = find_spec(name)
        return (
            None if spec is None else ModuleSpec(fullname, self, is_package=spec.submodule_search_locations is not None)
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = new_name(spec.name)
        assert name is not None
        module = importlib.import_module(name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the module's spec by one with its old name; put the right one back.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make modules importable under their old names, too.

    This puts our finder before Python's own finder, which would load a second copy of a module inside a renamed
    package.
    """
    sys.meta_path.insert(0, _Renamed())
