"""Each pitfall ends equal to plain PyTorch or in a typed error, never silently, never in a crash."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from tests.process.pitfalls import harness, scenarios

for module in pkgutil.iter_modules(scenarios.__path__):
    importlib.import_module(f"{scenarios.__name__}.{module.name}")


@pytest.mark.parametrize("name", list(harness.SCENARIOS))
def test_equal_or_a_typed_error(name: str) -> None:
    problem = harness.run(name)
    if problem:
        pytest.fail(f"{name}: {problem}", pytrace=False)
