"""Settings for all tests: what Hypothesis draws is the same in every run, and nothing is computed in vain."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.frozen import freeze, thaw
from tests.longest import is_long, longest_first

settings.register_profile("farpool", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("farpool")

# Before torch is loaded: its threads sleep, where they would spin, while they wait for cores that other tests use.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        freeze()


@pytest.hookimpl(trylast=True)  # after the tests that the command line does not select are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = longest_first(items, is_long, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.fixture
def thawed() -> Iterator[None]:
    """The garbage collector as other programs have it: nothing is frozen but what the test freezes."""
    thaw()
    yield
    thaw()
    freeze()
