"""What has to hold in the journals of all programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tests.chaos.journal import Call

__all__ = [
    "SLACK_S",
    "check_deadlines",
    "check_errors",
    "check_memory",
    "check_names",
    "check_objects",
    "confirmed_keys",
    "lacking",
]

SLACK_S = 30.0
"""A call that takes longer than its limit by this time hangs. The machine may be slow."""
Spans = Sequence[tuple[float, float]]


def check_deadlines(calls: Iterable[Call], stopped: Mapping[str, Spans], last: Mapping[str, int]) -> list[str]:
    """Return the calls that took too long or did not end.

    Parameters
    ----------
    calls : iterable of Call
        The calls.
    stopped : mapping
        By program, the times for which it was stopped, which do not count.
    last : mapping
        By program, the number of its last life. Earlier ones were killed, so their last calls may have no end.
    """
    wrong = []
    for call in calls:
        spans = stopped.get(call.program, ())
        took = (
            call.ended
            - call.began
            - sum(max(0.0, min(end, call.ended) - max(begin, call.began)) for begin, end in spans)
        )
        if not call.ended:
            if call.life == last[call.program]:
                wrong.append(f"deadline: {_shown(call)} did not end")
        elif call.limit and took > call.limit + SLACK_S:
            wrong.append(f"deadline: {_shown(call)} took {took:.1f} s instead of {call.limit:g} s")
    return wrong


def check_errors(calls: Iterable[Call]) -> list[str]:
    """Return the calls that raised an error that is none of farpool's."""
    return [f"error: {_shown(call)}: {call.error}" for call in calls if not call.is_typed]


def confirmed_keys(calls: Iterable[Call]) -> dict[str, float]:
    """Return the objects that nodes have confirmed to keep, and that no program has dropped, with the time."""
    put: set[str] = set()
    confirmed: dict[str, float] = {}
    for call in calls:
        if call.do == "put" and call.is_done:
            put.add(call.key)
        elif call.do == "keep" and call.is_done and call.value == "True" and call.key in put:
            confirmed[call.key] = call.ended
        elif call.do == "drop":
            confirmed.pop(call.key, None)
    return confirmed


def check_objects(calls: Sequence[Call], found: Mapping[str, str], digest: Callable[[str], str]) -> list[str]:
    """Return the reads that found something wrong, or did not find a confirmed object.

    Parameters
    ----------
    calls : sequence of Call
        The calls of one program.
    found : mapping
        Digests of the values that were found in the end, by key; empty for a key without a value.
    digest : callable
        Returns the digest of a key's true value.
    """
    wrong = []
    for number, call in enumerate(calls):
        if call.do not in ("get", "lookup") or not call.is_done:
            continue
        if call.do == "get" and call.value and call.value != digest(call.key):
            wrong.append(f"wrong value: {_shown(call)}")
        # A program reads only what is confirmed and not dropped.
        missing = {"get": not call.value, "lookup": "0" in call.value.split()}[call.do]
        if missing:
            wrong.append(f"lost: {_shown(call)} found nothing (call {number})")
    for key in confirmed_keys(calls):
        if found.get(key, "") != digest(key):
            state = "has another value" if found.get(key) else "is lost"
            wrong.append(f"lost: {key}, which was confirmed, {state} in the end")
    return wrong


def check_names(calls: Iterable[Call]) -> list[str]:
    """Return the reads of names that found an older version than before, or another value of a version."""
    wrong, versions = [], defaultdict[str, dict[int, str]](dict)
    highest: defaultdict[str, int] = defaultdict(int)
    for call in calls:
        if call.do not in ("publish", "open"):
            continue
        if call.do == "open" and highest[call.key] and call.error.startswith(("NameMissing", "NameLost")):
            wrong.append(f"lost: {_shown(call)}: {call.error}")
        if not call.is_done:
            continue
        text, _, value = call.value.partition(" ")
        version = int(text)
        if version < highest[call.key] or (call.do == "publish" and version == highest[call.key]):
            wrong.append(f"name: {_shown(call)} has version {version} after {highest[call.key]}")
        if versions[call.key].setdefault(version, value) != value:
            wrong.append(f"name: {_shown(call)} has another value than version {version} had")
        highest[call.key] = max(version, highest[call.key])
    return wrong


def check_memory(
    calls: Iterable[Call], members: Mapping[str, Collection[str]], gone: Collection[str], expired: Collection[str]
) -> list[str]:
    """Return comparisons that found other bits, and leases that lost their bytes for no reason.

    Parameters
    ----------
    calls : iterable of Call
        The calls.
    members : mapping
        By lease, the members that have ever lent it memory.
    gone : collection of str
        Members that lost their memory.
    expired : collection of str
        Leases that expired.
    """
    wrong = [f"wrong bytes: {_shown(call)}" for call in calls if call.do == "wrong"]
    for call in calls:
        if call.do == "lost" and call.key not in expired and not set(members.get(call.key, ())) & set(gone):
            wrong.append(f"lost: {_shown(call)}")
    return wrong


def lacking(calls: Iterable[Call], needed: Collection[str], since: float, times: int) -> list[str]:
    """Return the kinds of calls of which fewer than `times` began after `since` and worked."""
    counts = dict.fromkeys(needed, 0)
    for call in calls:
        if call.do in counts and call.began > since and call.is_done:
            counts[call.do] += 1
    return [kind for kind, count in counts.items() if count < times]


def _shown(call: Call) -> str:
    return f"{call.program}, process {call.life}, call {call.number}: {call.do} {call.key} {call.value}".strip()
