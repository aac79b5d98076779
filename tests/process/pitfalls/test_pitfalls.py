"""Each pitfall ends equal to plain PyTorch or in a typed error, never silently, never in a crash."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.process.pitfalls import harness, scenarios

for module in pkgutil.iter_modules(scenarios.__path__):
    importlib.import_module(f"{scenarios.__name__}.{module.name}")

ENOUGH = 2
"""So many variants of a scenario run in make test; the others are slow."""


def names() -> Iterator[Any]:
    variants: Counter[str] = Counter()
    for name in harness.SCENARIOS:
        variants[name.partition("[")[0]] += 1
        yield pytest.param(name, id=name, marks=pytest.mark.slow if variants[name.partition("[")[0]] > ENOUGH else [])


@pytest.mark.parametrize("name", list(names()))
def test_equal_or_a_typed_error(name: str) -> None:
    problem = harness.run(name)
    if problem:
        pytest.fail(f"{name}: {problem}", pytrace=False)
