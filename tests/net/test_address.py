"""Addresses of nodes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool.cluster.wire.address import Address, parse_address
from farpool.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("tcp://10.0.0.7:7471", "tcp://10.0.0.7:7471"),
        ("10.0.0.7:07471", "tcp://10.0.0.7:7471"),
        ("Node-3.Example:1", "tcp://node-3.example:1"),
        ("[0:0:0:0:0:0:0:1]:7471", "tcp://[::1]:7471"),
        ("tcp://[FE80::1]:65535", "tcp://[fe80::1]:65535"),
        ("unix:///run/farpool/socket", "unix:///run/farpool/socket"),
    ],
)
def test_an_address_has_one_spelling(text: str, normalized: str) -> None:
    address = parse_address(text)
    assert str(address) == normalized
    assert parse_address(normalized) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp://",
        "10.0.0.7",
        "10.0.0.7:",
        "10.0.0.7:seven",
        ":7471",
        "::1:7471",
        "[::g]:7471",
        "300.0.0.1:7471",
        "-host:7471",
        "a b:7471",
        "http://10.0.0.7:7471",
        "unix://relative/socket",
        "unix:///run/\nsocket",
        "10.0.0.7:7471/path",
    ],
)
def test_what_is_no_address_is_named_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--listen is .*expected an address like") as caught:
        parse_address(text, "--listen")
    assert repr(text) in str(caught.value)
    assert caught.value.setting == "--listen"


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_a_port_that_there_is_not_is_named(port: int) -> None:
    with pytest.raises(ConfigError, match="expected a port from 1 to 65535"):
        parse_address(f"localhost:{port}")


def test_port_zero_is_allowed_where_any_free_port_will_do() -> None:
    assert parse_address("localhost:0", any_port=True) == Address("tcp", "localhost", 0)


def test_a_path_longer_than_the_kernel_takes_is_refused() -> None:
    parse_address("unix:///" + "p" * 106)
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        parse_address("unix:///" + "p" * 107)


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ConfigError:
        return
    assert parse_address(str(address)) == address
