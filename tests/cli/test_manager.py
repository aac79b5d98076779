"""Options of ``farpool manager`` that it checks before it opens anything."""

from __future__ import annotations

import pytest

from farpool.cli.manager import _redundancy_of
from farpool.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", "Copies(1)"), ("2", "Copysets(2, 2, spread='')"), ("3:rack", "Copysets(2, 3, spread='rack')")],
)
def test_copysets_names_the_redundancy_of_repair(given: str, expected: str) -> None:
    assert repr(_redundancy_of(given)) == expected


@pytest.mark.parametrize("wrong", ["x", ":rack", "0", "65", "-1", "2.5"])
def test_wrong_copysets_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError):
        _redundancy_of(wrong)
