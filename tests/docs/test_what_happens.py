"""Each failure on the page has users, operators and tests, and the tests are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "what-happens-when.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
DEFINITION = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)
SECTIONS = {part.splitlines()[0]: part for part in PAGE.split("\n### ")[1:]}


@cache
def functions(file: str) -> frozenset[str]:
    return frozenset(DEFINITION.findall((ROOT / file).read_text()))


def test_the_tests_that_the_page_names_are_there() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 60
    assert len(named) == PAGE.count("::")
    missing = [f"{file}::{name}" for file, name in named if not (ROOT / file).is_file() or name not in functions(file)]
    assert not missing


@pytest.mark.parametrize("section", SECTIONS)
def test_each_failure_says_what_users_see_what_operators_do_and_which_test_shows_it(section: str) -> None:
    text = SECTIONS[section].partition("\n## ")[0]
    assert TEST.search(text), section
    if "\n|" not in text:
        for part in ("- **Users.**", "- **Operators.**", "- **Shown by**"):
            assert text.count(part) == 1, (section, part)
