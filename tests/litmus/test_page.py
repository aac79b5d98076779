"""Each rule of docs/memory-model.md has a litmus test with its number, and each litmus test has a rule."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "memory-model.md"


def test_each_rule_has_a_litmus_test_and_each_litmus_test_has_a_rule() -> None:
    rules = re.findall(r"^- \*\*([A-Z]\d+)\.\*\*", PAGE.read_text(), re.MULTILINE)
    tests = {
        number.upper()
        for file in HERE.glob("test_*.py")
        for number in re.findall(r"^def test_([a-z]\d+)_", file.read_text(), re.MULTILINE)
    }
    assert len(rules) == len(set(rules)) > 20
    assert tests == set(rules)


def test_each_file_names_the_rules_that_it_tests() -> None:
    for file in HERE.glob("test_*.py"):
        text = file.read_text()
        numbers = [int(number) for number in re.findall(r"^def test_[a-z](\d+)_", text, re.MULTILINE)]
        if numbers:
            named = re.search(r"rules [A-Z](\d+) (?:to|and) [A-Z](\d+)", text)
            assert named is not None, file.name
            assert [int(one) for one in named.groups()] == [min(numbers), max(numbers)], file.name
