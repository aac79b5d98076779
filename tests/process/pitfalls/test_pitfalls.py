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
LONG = frozenset(
    (
        "a_module_compiled_to_native_code_is_right_or_refused",
        "a_view_is_paged_or_a_copy_and_never_a_plain_alias",
        "data_loader_workers_with_a_paged_data_set_are_right_or_raise[forkserver]",
        "every_optimizer_of_torch_trains_to_the_same_bits",
        "gradients_of_functions_are_equal_or_refused[random]",
        "operations_on_the_whole_table_are_equal_or_name_the_budget",
        "reading_by_index_is_as_in_torch[many_blocks]",
        "what_is_saved_loads_in_a_process_without_farpool[a state dict]",
        "what_is_saved_loads_in_a_process_without_farpool[a whole module]",
        "writing_a_number_by_index_is_as_in_torch[many_blocks]",
    )
)
"""These take seconds, and quicker tests show the same of less."""


def names() -> Iterator[Any]:
    variants: Counter[str] = Counter()
    assert harness.SCENARIOS.keys() >= LONG
    for name in harness.SCENARIOS:
        variants[name.partition("[")[0]] += 1
        slow = name in LONG or variants[name.partition("[")[0]] > ENOUGH
        yield pytest.param(name, id=name, marks=pytest.mark.slow if slow else [])


@pytest.mark.parametrize("name", list(names()))
def test_equal_or_a_typed_error(name: str) -> None:
    problem = harness.run(name)
    if problem:
        pytest.fail(f"{name}: {problem}", pytrace=False)
