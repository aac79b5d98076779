"""What a program says about its way to nodes."""

from __future__ import annotations

import pytest

from farpool import Store
from farpool.cluster.wire.settings import TIMEOUT_MAX_S, checked_timeout, checked_transport
from farpool.errors import ConfigError


@pytest.mark.parametrize("timeout", [0, -1.0, True, "5", None, float("nan"), float("inf"), 1e10, 10**400])
def test_a_timeout_that_nothing_can_wait_for_is_named(timeout: object) -> None:
    with pytest.raises(ConfigError, match=r"timeout of far is .*, expected seconds above 0, .*at most 1,000,000"):
        checked_timeout(timeout, "timeout of far")
    with pytest.raises(ConfigError, match=r"timeout is "):
        Store("a:1", timeout=timeout)  # type: ignore[arg-type]


def test_a_timeout_is_a_float() -> None:
    for timeout in (1, 0.5, TIMEOUT_MAX_S):
        checked = checked_timeout(timeout)
        assert (checked, type(checked)) == (timeout, float)


@pytest.mark.parametrize("transport", ["pigeon", "", None, 3])
def test_an_unknown_transport_is_named(transport: object) -> None:
    with pytest.raises(ConfigError, match=r"transport is .*, expected auto, mapped, tcp or the name of an installed"):
        checked_transport(transport)
