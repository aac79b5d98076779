"""Addresses of a pool's managers."""

from __future__ import annotations

import pytest

from farpool.cluster.leases.location import is_pool, parse_location
from farpool.errors import ConfigError


def test_an_address_names_managers_and_terms() -> None:
    assert is_pool("farpool://a")
    assert not is_pool("tcp://a:7471")
    plain = parse_location("farpool://127.0.0.1")
    assert [str(one) for one in plain.managers] == ["tcp://127.0.0.1:7470"]
    assert (plain.tenant, plain.size, plain.redundancy, plain.is_secure) == (None, 0, "none", False)
    full = parse_location(
        "farpool://m1:1,[::1]:2/?tenant=team&size=8GiB&medium=nvme&copies=2&spread=rack,zone&share=0.5&reclaim_ms=10"
        "&ttl=2&holder=trainer"
    )
    assert [(one.host, one.port) for one in full.managers] == [("m1", 1), ("::1", 2)]
    assert (full.tenant, full.size, full.medium, full.redundancy) == ("team", 8 << 30, "nvme", "copies:2")
    assert (full.spread, full.share, full.reclaim_ms, full.ttl) == (("rack", "zone"), 0.5, 10, 2.0)
    assert full.holder == "trainer"
    assert parse_location("farpool://localhost?tenant=7").tenant == 7


def test_tokens_cross_no_network_without_tls() -> None:
    assert parse_location("farpool://10.0.0.7").is_secure
    assert parse_location("farpool://127.0.0.1,m2").is_secure
    assert not parse_location("farpool://127.0.0.1,localhost,[::1]").is_secure
    assert parse_location("farpool://localhost?tls=1").is_secure
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7:7470 is not on loopback"):
        parse_location("farpool://10.0.0.7?tls=0")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("farpool://", "the manager ''"),
        ("farpool://a,,b", "the manager ''"),
        ("farpool://a:x", "the manager 'a:x'"),
        ("farpool://a:0", "a port from 1"),
        ("farpool://a?tenant", "tenant is ''"),
        ("farpool://a?colour=red", "the option 'colour', expected some of tenant"),
        ("farpool://a?ttl=2&ttl=3", "the option 'ttl', twice"),
        ("farpool://a?ttl=0.1", "ttl is 0.1"),
        ("farpool://a?ttl=nan", "ttl is 'nan'"),
        ("farpool://a?ttl=soon", "ttl is 'soon'"),
        ("farpool://a?share=0", "share is 0"),
        ("farpool://a?share=inf", "share is inf"),
        ("farpool://a?copies=9", "copies is 9"),
        ("farpool://a?copies=1.5", "copies is 1.5"),
        ("farpool://a?reclaim_ms=0", "reclaim_ms is 0"),
        ("farpool://a?size=much", "size is 'much'"),
        ("farpool://a?medium=", "medium is ''"),
        ("farpool://a?tls=yes", "tls is 'yes'"),
    ],
)
def test_the_part_that_is_wrong_is_named(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_location(text, "nodes of remote")
    assert part in str(error.value)
    assert str(error.value).startswith("nodes of remote is ")
