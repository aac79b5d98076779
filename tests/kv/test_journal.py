"""The journal of a process that forks."""

from __future__ import annotations

import os
import socket
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


def test_a_socket_that_does_not_listen_yet_is_not_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(journal, "_journal", journal._Journal())

    class AskedBefore(socket.socket):
        def listen(self, backlog: int = 8) -> None:
            assert journal.runs() == []  # another process asks between bind and listen
            super().listen(backlog)

    with monkeypatch.context() as patched:
        patched.setattr(journal.socket, "socket", AskedBefore)
        journal.record("ours", "load", 2, 1, {}, 0.1)
    ((process, entries),) = journal.runs()
    assert (process, [entry.request for entry in entries]) == (os.getpid(), ["ours"])
    assert [path.name for path in journal.journal_folder().iterdir()] == [f"kv-{os.getpid()}.sock"]
