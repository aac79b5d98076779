"""The fabric ``nixl`` on a host without the NIXL library."""

from __future__ import annotations

import sys

import pytest

from farpool import Store
from farpool.errors import ConfigError
from farpool_nixl.agent import bindings


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    monkeypatch.setitem(sys.modules, "nixl_cu13._bindings", None)
    bindings.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"the fabric 'nixl' needs the package 'nixl-cu13'.*pip install nixl-cu13"
        ):
            Store("a:1", transport="nixl")
    finally:
        bindings.cache_clear()
