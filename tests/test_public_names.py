"""Names under which users import farpool's parts, wherever these are in the package."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import farpool

NAMES = {
    "farpool.net.fabric": "farpool.abc.fabric",
    "farpool.registry": "farpool.cluster.registry",
    "farpool.store": "farpool.cluster.store",
    "farpool.store.names": "farpool.cluster.names",
    "farpool.tiers": "farpool.memory.tiers",
}
"""Public name of each module, and where it is."""


@pytest.mark.parametrize("public", NAMES)
def test_a_public_name_has_what_the_module_has(public: str) -> None:
    named, own = importlib.import_module(public), importlib.import_module(NAMES[public])
    assert set(own.__all__) <= set(named.__all__)
    assert all(getattr(named, name) is getattr(own, name) for name in own.__all__)


@pytest.mark.parametrize("public", [*NAMES, "farpool.testing"])
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


def test_errors_keep_the_module_that_pickles_of_earlier_releases_name() -> None:
    for name in farpool.errors.__all__:
        assert getattr(farpool.errors, name).__module__ == "farpool.errors"
