"""Names under which users import farpool's parts, wherever these are in the package."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys

import pytest

import farpool
from farpool._renamed import RENAMED, new_name
from farpool.store import NodeStatus

FILES = ("farpool.registry", "farpool.store", "farpool.tiers")
"""Public names that are modules of their own."""
CONNECTORS = {
    "farpool.kv.lmcache": ("lmcache", "FarpoolL2"),
    "farpool.kv.sglang": ("sglang", "FarpoolHiCache"),
    "farpool.kv.vllm": ("vllm", "FarpoolTier"),
}
"""Names of modules in the configurations of engines, with the engine and the class that it loads from there."""


def inside(package: str) -> list[str]:
    module = importlib.import_module(package)
    return [found.name for found in pkgutil.iter_modules(getattr(module, "__path__", []))]


MOVED = sorted(RENAMED.keys() - CONNECTORS.keys())
OLD = sorted({*MOVED, *(f"{name}.{module}" for name in MOVED for module in inside(RENAMED[name]))} - {*FILES})


@pytest.mark.parametrize("public", FILES)
def test_a_public_name_has_what_the_module_has(public: str) -> None:
    named, own = importlib.import_module(public), importlib.import_module(RENAMED[public])
    assert set(own.__all__) <= set(named.__all__)
    assert all(getattr(named, name) is getattr(own, name) for name in own.__all__)


@pytest.mark.slow
def test_each_module_is_the_same_under_its_old_name() -> None:
    """In a process of its own, so that nothing has imported the modules before."""
    program = (
        "import importlib, sys\nimport farpool\nfrom farpool._renamed import new_name\n"
        "for old in sys.argv[1:]:\n"
        "    module = importlib.import_module(old)\n"
        "    name = new_name(old)\n"
        "    assert module is importlib.import_module(name) is sys.modules[old], old\n"
        "    assert module.__name__ == module.__spec__.name == name, old\n"
    )
    assert len(OLD) > 100
    subprocess.run([sys.executable, "-W", "error", "-c", program, *OLD], check=True, timeout=120)


def test_a_module_that_never_was_is_missing_under_an_old_name_too() -> None:
    assert new_name("farpool.node.process") == "farpool.cluster.node.process"
    assert new_name("farpool.nodes") is None
    assert new_name("other.node") is None
    with pytest.raises(ModuleNotFoundError, match=r"farpool\.node\.nothing"):
        importlib.import_module("farpool.node.nothing")


@pytest.mark.parametrize("public", [*FILES, "farpool.store.names", "farpool.net.fabric", "farpool.testing"])
def test_each_public_name_is_imported_by_itself_and_from_its_parent(public: str) -> None:
    parent, _, name = public.rpartition(".")
    program = (
        f"import {public}\nfrom {parent} import {name}\nimport sys\n"
        f"assert {public} is {name} is sys.modules[{public!r}]"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120)


def test_the_public_modules_are_attributes_of_farpool() -> None:
    program = (
        "import farpool\nfarpool.store.Store, farpool.store.names.Names, farpool.registry.Registry, farpool.tiers.Dram"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120)


def test_a_pickle_of_an_earlier_release_is_read() -> None:
    present = pickle.dumps(NodeStatus, protocol=0)
    old = present.replace(b"farpool.cluster.store.", b"farpool.store.")
    assert old != present
    assert pickle.loads(old) is NodeStatus


def test_errors_keep_the_module_that_pickles_of_earlier_releases_name() -> None:
    for name in farpool.errors.__all__:
        assert getattr(farpool.errors, name).__module__ == "farpool.errors"


ENGINE_WITHOUT_CODE = """
import importlib, importlib.abc, importlib.machinery, importlib.metadata, pickle, sys, types

class Any(type):
    def __getattr__(cls, name):
        return Any(name, (), {}) if not name.startswith("__") else super().__getattribute__(name)

class Module(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, Any(name, (), {"__module__": self.__name__}))

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] == engine else None
    def create_module(self, spec):
        return Module(spec.name)
    def exec_module(self, module):
        pass

engine, old, new, name = sys.argv[1:]
sys.meta_path.insert(0, Finder())
importlib.metadata.version = lambda package: "1.0"
"""


@pytest.mark.slow
@pytest.mark.parametrize("old", CONNECTORS)
def test_an_engine_loads_its_connector_by_the_name_in_configurations(old: str) -> None:
    """In a process of its own, as an engine's workers are, with an engine whose classes are empty."""
    engine, name = CONNECTORS[old]
    program = ENGINE_WITHOUT_CODE + (
        "loaded = getattr(importlib.import_module(old), name)\n"
        "module = importlib.import_module(new)\n"
        "assert module is sys.modules[old] and loaded is getattr(module, name)\n"
        "assert module.__spec__.name == module.__name__ == new\n"
        "present = pickle.dumps(loaded, protocol=0)\n"
        "earlier = present.replace(new.encode(), old.encode())\n"
        "assert earlier != present and pickle.loads(earlier) is pickle.loads(present) is loaded\n"
    )
    arguments = [engine, old, RENAMED[old], name]
    subprocess.run([sys.executable, "-W", "error", "-c", program, *arguments], check=True, timeout=120)
