"""Settings are checked in one place, and the errors name the value, the expectation and the setting."""

from __future__ import annotations

import math
import re

import pytest

from farpool.checks import require_choice, require_seconds, require_whole
from farpool.errors import ConfigError


@pytest.mark.parametrize("value", [1, 64])
def test_a_whole_number_within_its_limits_is_returned(value: int) -> None:
    assert require_whole(value, "threads", 1, 64) == value
    assert require_whole(10**30, "keep", 0) == 10**30


@pytest.mark.parametrize("value", [0, 65, True, 1.0, "1", None])
def test_another_value_than_a_whole_number_within_its_limits_is_refused(value: object) -> None:
    expected = f"threads is {value!r}, expected a whole number from 1 to 64, one for each call"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$") as refused:
        require_whole(value, "threads", 1, 64, ", one for each call")
    assert refused.value.setting == "threads"


def test_a_whole_number_without_an_upper_limit_names_the_lower_limit_alone() -> None:
    with pytest.raises(ConfigError, match=r"^keep is -1, expected a whole number, at least 0 record$"):
        require_whole(-1, "keep", 0, hint=" record")
    with pytest.raises(ConfigError, match=r"^keep is too large a number, expected"):
        require_whole(10**5000, "keep", 0, 10)


@pytest.mark.parametrize("value", [0, 2, 0.5, 1e300])
def test_seconds_are_returned_as_a_float(value: float) -> None:
    checked = require_seconds(value, "spin")
    assert (checked, type(checked)) == (value, float)


@pytest.mark.parametrize("value", [-0.1, True, "1", None, math.nan, math.inf, 10**400])
def test_seconds_that_are_negative_or_not_finite_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^--spin is .*, expected seconds, at least 0$") as refused:
        require_seconds(value, "--spin", setting="spin")
    assert refused.value.setting == "spin"


def test_seconds_outside_their_limits_are_refused_with_both_limits() -> None:
    with pytest.raises(ConfigError, match=r"^ttl is 0, expected seconds above 0 and at most 1e\+16, or None$"):
        require_seconds(0, "ttl", None, 1e16, hint=", or None")
    with pytest.raises(ConfigError, match=r"^wait is 0.5, expected seconds, at least 1, say 2, and at most 1,000,000$"):
        require_seconds(0.5, "wait", 1.0, 1e6, example=", say 2,")
    with pytest.raises(ConfigError, match=r"^ttl is 1000001.0, "):
        require_seconds(1e6 + 1, "ttl", None, 1e6)
    assert require_seconds(math.inf, "timeout", None, math.inf) == math.inf


def test_a_choice_that_is_not_known_is_refused_with_all_choices() -> None:
    require_choice("cpu", "device", ("cpu", "cuda"))
    with pytest.raises(
        ConfigError, match=r"^device: 'tpu' is not known; expected one of cpu, cuda, or none$"
    ) as refused:
        require_choice("tpu", "device", ("cpu", "cuda"), ", or none")
    assert refused.value.setting == "device"
