"""Requests that schemathesis makes from the API's own document: no answer is a failure, and each is as described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from farpool.cluster.manager.credentials import create_token, set_identity
from farpool.cluster.manager.records import Role
from farpool.cluster.members.records import AliveRecord, MemberRecord, alive_key, encode, record_key
from farpool.cluster.names.records import NameRecord, history_key, name_key
from farpool.cluster.names.records import encode as encode_name
from farpool.cluster.registry import Put, open_registry
from tests.manager.running import RunningManager, running_manager

pytestmark = pytest.mark.slow
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningManager, str]]:
    place = str(tmp_path_factory.mktemp("fuzz") / "registry.sqlite")
    with open_registry(place, timeout=60.0) as registry:
        for number in (1, 2):
            identity = bytes([number]) * 16
            record = MemberRecord(addresses=(f"tcp://127.0.0.1:{number}",), name=str(number), media={"dram": 1 << 30})
            registry.commit([], [Put(record_key(identity), encode(record))])
            registry.commit([], [Put(alive_key(identity), encode(AliveRecord(ready=True)))])
        registry.commit([], [Put(record_key(b"\x03" * 16), b"damaged")])
        version = encode_name(NameRecord(1, "p", "m", 10, 1, False, 0.0, "w"))
        registry.commit([], [Put(name_key("0"), version), Put(history_key("0", 1), version)])
        token, _ = create_token(registry, Role.ADMIN)
        set_identity(registry, "0", Role.OPERATOR)
    with running_manager(place) as manager:
        yield manager, token


def test_each_answer_is_as_described(fuzzed: tuple[RunningManager, str]) -> None:
    manager, token = fuzzed
    # A stream has no end: below.
    schema = schemathesis.openapi.from_url(f"{manager.url}/openapi.json").exclude(path="/v1/events")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 15
    calls: Counter[str] = Counter()
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=12, suppress_health_check=list(HealthCheck))
        def answers(case: Any) -> None:
            calls[case.operation.label] += 1
            case.call_and_validate(headers={"Authorization": f"Bearer {token}"}, checks=CHECKS, timeout=60)

        answers()
    assert all(calls[operation.label] for operation in operations)


@given(
    last=st.one_of(st.none(), st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=30)),
    after=st.one_of(st.none(), st.integers(-2, 2**64), st.text(max_size=5)),
)
@settings(max_examples=60)
def test_a_stream_begins_or_is_refused(
    fuzzed: tuple[RunningManager, str], last: str | None, after: int | str | None
) -> None:
    manager, token = fuzzed
    headers = {} if last is None else {b"Last-Event-ID": last.encode("latin-1")}
    with manager.client(token=token) as client:
        try:
            request = client.build_request(
                "GET", "/v1/events", headers=headers, params={} if after is None else {"after": after}
            )
            answer = client.send(request, stream=True)
        except httpx.LocalProtocolError:
            return  # the client itself refuses this header
        assert answer.status_code in (200, 400, 422)
        answer.close()
