"""The journal of a process that forks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farpool.kv import journal
from tests.forking import in_forked_child


def test_a_forked_child_begins_with_an_empty_journal_and_answers_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(journal, "_journal", journal._Journal())  # one that listens in this folder
    journal.record("ours", "load", 2, 1, {}, 0.1)

    def record_in_the_child() -> None:
        assert journal.recorded() == []
        journal.record("theirs", "save", 1, 1, {}, 0.1)
        answers = dict(journal.runs("theirs"))
        assert [entry.request for entry in answers[os.getpid()]] == ["theirs"]

    in_forked_child(record_in_the_child)
    assert [entry.request for entry in journal.recorded()] == ["ours"]
