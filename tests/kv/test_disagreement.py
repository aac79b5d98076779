"""A reader that finds nothing is told if there is KV of its model under other settings, and under which."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from farpool.errors import NodeError
from farpool.kv import Namespace, Reason, disagreement
from farpool.kv.cache import PrefixCache
from farpool.kv.disagreement import Disagreements
from farpool.kv.journal import record, recorded
from tests.kv.test_keys import NAMESPACE
from tests.kv.test_prefix import FULL, TOKENS, make, node, save_steps
from tests.nodes import PATIENCE, eventually

__all__ = ["make", "node"]  # fixtures

Make = Callable[..., PrefixCache]


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        ({"weights_id": "2"}, Reason.OTHER_WEIGHTS, "weights '1' instead of '2'"),
        ({"dtype": "bfloat16"}, Reason.OTHER_DTYPE, "dtype 'float16' instead of 'bfloat16'"),
        ({"layout": "tokens-first"}, Reason.OTHER_LAYOUT, "layout 'layer-major' instead of 'tokens-first'"),
        ({"block": 8}, Reason.OTHER_LAYOUT, "tokens_per_block 4 instead of 8"),
        ({"parallel": {"tp": 2}}, Reason.OTHER_LAYOUT, "parallel () instead of (('tp', 2),)"),
        ({"weights_id": "2", "dtype": "bfloat16"}, Reason.OTHER_WEIGHTS, "dtype 'float16' instead of 'bfloat16'"),
        ({"tenant": "other"}, Reason.ABSENT, None),
        ({"model": "other"}, Reason.ABSENT, None),
        ({}, Reason.ABSENT, None),
    ],
)
def test_who_disagrees_with_a_writer_is_told_in_what(
    make: Make, changes: dict[str, Any], reason: Reason, said: str | None
) -> None:
    save_steps(make([FULL]), [FULL], TOKENS[:16])
    reader = make([FULL], **changes)
    first = f"first {changes}"
    assert reader.lookup([99] * 20, request=first).reason is Reason.ABSENT  # nobody waits for the answer
    reader._lookups._disagreements.join(PATIENCE)
    assert reader.lookup([98] * 20, request=f"then {changes}").reason is reason
    for name in (first, f"then {changes}"):
        entries = [one for one in recorded(name) if one.step == "compare"]
        assert [set(one.reasons) for one in entries] == ([] if said is None else [{str(reason)}])
        assert all(said is not None and said in one.note for one in entries)


def test_weights_that_changed_are_named_until_there_is_kv_of_the_new_ones(make: Make) -> None:
    cache = make([FULL])
    save_steps(cache, [FULL], TOKENS[:16])
    cache.weights_id = "2"
    cache.lookup(TOKENS)
    cache._lookups._disagreements.join(PATIENCE)
    assert cache.lookup(TOKENS).reason is Reason.OTHER_WEIGHTS
    save_steps(cache, [FULL], TOKENS[:16])
    assert cache.lookup(TOKENS).tokens == 16


def test_nodes_are_asked_at_most_once_a_minute_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    answer = threading.Event()

    def namespaces() -> Mapping[bytes, Namespace]:
        asked.append(time.monotonic())
        answer.wait(PATIENCE)
        if len(asked) > 1:
            raise NodeError("away", node="n")
        return {NAMESPACE.digest: NAMESPACE}

    ours = replace(NAMESPACE, dtype="bfloat16")
    found = Disagreements(namespaces)
    began = time.monotonic()
    for number in range(200):
        assert found.reason(ours, f"waits {number}", 3) is None
    assert time.monotonic() - began < PATIENCE
    answer.set()
    found.join(PATIENCE)
    eventually(lambda: found.reason(ours, "", 3) is Reason.OTHER_DTYPE)
    assert len(asked) == 1
    told = [one for one in recorded("waits ") if one.step == "compare"]
    assert 0 < len(told) <= disagreement._WAITING_LOOKUPS_MAX
    monkeypatch.setattr(disagreement, "_ASK_INTERVAL_S", 0.0)
    found.reason(ours, "", 3)
    found.join(PATIENCE)
    eventually(lambda: found.reason(ours, "", 3) is None)  # what cannot be asked is not known


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nodes_are_asked_again_after_an_error_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disagreement, "_ASK_INTERVAL_S", 0.0)
    answers = iter([ValueError("not a namespace"), {NAMESPACE.digest: NAMESPACE}])

    def namespaces() -> Mapping[bytes, Namespace]:
        answer = next(answers, {NAMESPACE.digest: NAMESPACE})
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = Disagreements(namespaces)
    ours = replace(NAMESPACE, dtype="bfloat16")
    eventually(lambda: found.reason(ours, "", 3) is Reason.OTHER_DTYPE)


def test_a_request_is_found_by_its_whole_name_before_those_that_have_it_in_theirs() -> None:
    for name in ("talk-1", "talk-17", "talk-12"):
        record(name, "load", 1, 1, {}, 0.0)
    assert {one.request for one in recorded("talk-1")} == {"talk-1"}
    assert {one.request for one in recorded("talk-1")} < {one.request for one in recorded("talk-")}
    assert {one.request for one in recorded("lk-17")} == {"talk-17"}
    assert {"talk-1", "talk-12"} <= {one.request for one in recorded()}
