"""Nodes and programs of the previous release and of this one, together: nothing that was confirmed is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from farpool.cluster.node.process import RunningNode
from tests.certificates import Certificates, keys_file
from tests.nodes import PATIENCE, stats
from tests.upgrade.client import value_of
from tests.upgrade.releases import Program, Releases, other

BOTH = pytest.mark.parametrize("release", ["old", "new"])
"""The release of the one side; the other side has the other release."""
KEYS = [f"key {number}" for number in range(60)]
TURNS = 15
"""Turns that each program makes between two restarts."""
SECRET = "0123456789abcdef0123456789abcdef"


def nothing_missing(program: Program, keys: Sequence[str]) -> None:
    assert program.found(keys) == {way: [] for way in ("get", "get_many", "lookup", "pin")}


def go_on(programs: Sequence[Program]) -> None:
    """Wait until each program has made `TURNS` more turns, with no wrong result."""
    before = [program.progress()[0] for program in programs]
    deadline = time.monotonic() + 4 * PATIENCE
    for program, then in zip(programs, before, strict=True):
        while (now := program.progress())[0] < then + TURNS:
            assert now[1] == []
            assert time.monotonic() < deadline, "a program came to a halt"
            time.sleep(0.02)
        assert now[1] == []


def test_each_release_runs_its_own_python_and_its_own_native_core(releases: Releases) -> None:
    for release in ("old", "new"):
        with releases.program(release) as program:
            package, native = program.where()
        assert ("previous-release" in package) == ("previous-release" in native) == (release == "old")


@BOTH
@pytest.mark.parametrize("transport", ["mapped", "tcp"])
def test_a_program_uses_a_node_of_the_other_release(releases: Releases, release: str, transport: str) -> None:
    with (
        releases.node(other(release)) as node,
        releases.program(release) as program,
        releases.program(other(release)) as neighbour,
    ):
        for one in (program, neighbour):
            one.open([node.address], 1, {"transport": transport})
        assert set(program.put(KEYS)) == {"stored"}
        assert set(neighbour.put(KEYS)) == {"present"}
        nothing_missing(program, KEYS)
        nothing_missing(neighbour, KEYS)
        program.drop(KEYS[:10])
        assert neighbour.sizes(KEYS[:10]) == [None] * 10
        assert set(neighbour.put(KEYS[:10])) == {"stored"}
        nothing_missing(program, KEYS)
        program.lend(node.address, 4 << 20)
        for key in KEYS:
            program.write(key)
        assert program.read() == []


@BOTH
def test_access_keys_work_between_the_releases(releases: Releases, release: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(f'[keys.team]\nsecret = "{SECRET}"\nrights = ["read", "publish"]\ntenant = 3\n')
    with releases.node(other(release), keys=str(keys)) as node, releases.program(release) as program:
        program.open([node.address], 1, {"key": f"team:{SECRET}"})
        assert set(program.put(KEYS)) == {"stored"}
        nothing_missing(program, KEYS)
        program.open([node.address], 1, {"key": f"team:{SECRET[::-1]}"})
        for said in program.attempt(["put", "get", "lookup"], KEYS[0]):
            assert said.startswith("AccessDeniedError: "), said
            assert "'team' was not proved" in said


@BOTH
def test_certificates_work_between_the_releases(releases: Releases, release: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    keys = keys_file(tmp_path / "keys.toml", {"trainer": (["read", "publish"], 3)})
    trainer = {"FARPOOL_TLS": str(certificates.client("trainer"))}
    with (
        releases.node(other(release), keys=keys, tls=certificates.node()) as node,
        releases.program(release, trainer) as program,
    ):
        assert node.address.startswith("tls://")
        program.open([node.address], 1, {"transport": "tcp"})
        assert set(program.put(KEYS)) == {"stored"}
        assert program.attempt(["get"], KEYS[0])[0].startswith("result b'")
        nothing_missing(program, KEYS)


@BOTH
def test_the_kv_that_one_release_saved_is_loaded_by_the_other(releases: Releases, release: str) -> None:
    with (
        releases.node("old") as first,
        releases.node("new") as second,
        releases.program(release) as saver,
        releases.program(other(release)) as loader,
    ):
        nodes = [first.address, second.address]
        for number in range(1, 5):
            tokens, right, reason = saver.kv(nodes, number, True)
            assert (tokens, right) == (64, True), reason
            tokens, right, reason = loader.kv(nodes, number, False)
            assert (tokens, right) == (64, True), reason


@pytest.mark.parametrize("gone", [0, 1])
def test_two_copies_on_members_of_both_releases_survive_the_loss_of_one(releases: Releases, gone: int) -> None:
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(releases.node(release)) for release in ("old", "new", "old")]
        programs = {release: stack.enter_context(releases.program(release)) for release in ("old", "new")}
        every = [f"{release} {key}" for release in programs for key in KEYS]
        for release, program in programs.items():
            program.open([node.address for node in nodes], 2, {})
            assert set(program.put([key for key in every if key.startswith(release)])) == {"stored"}
        # Both releases rank the members alike: each finds the other's copies where it would put its own.
        for program in programs.values():
            assert set(program.put(every)) == {"present"}
            nothing_missing(program, every)
        assert sum(stats(node.address)["objects"] for node in nodes) == 2 * len(every)
        nodes[gone].kill()
        for program in programs.values():
            nothing_missing(program, every)


@pytest.mark.parametrize("kill", [False, True], ids=["terminated", "killed"])
@BOTH
def test_a_node_becomes_one_of_the_other_release_and_keeps_everything(
    releases: Releases, release: str, kill: bool
) -> None:
    with (
        releases.node(release, grace=PATIENCE) as node,
        releases.program("old") as old,
        releases.program("new") as new,
    ):
        identity = (node.folder / "identity").read_bytes()
        for name, program in (("old", old), ("new", new)):
            program.open([node.address], 1, {})
            assert set(program.put([f"{name} {key}" for key in KEYS])) == {"stored"}
            program.lend(node.address, 4 << 20)
            for key in KEYS:
                program.write(f"{name} {key}")
        every = [f"{name} {key}" for name in ("old", "new") for key in KEYS]
        # There and back: the new release may be taken back, too.
        for release_now in (other(release), release):
            releases.become(node, release_now, kill=kill)
            assert (node.folder / "identity").read_bytes() == identity
            counters = stats(node.address)
            assert (counters["adopted"], counters["lent"]) == (len(every), 8 << 20)
            for program in (old, new):
                nothing_missing(program, every)
                assert program.read() == []
                program.write(f"later {release_now}")


@BOTH
def test_objects_in_the_nvme_file_of_one_release_are_found_by_the_other(
    releases: Releases, release: str, tmp_path: Path
) -> None:
    keys = [f"far {number}" for number in range(500)]
    with (
        releases.node(release, "4MiB", nvme=(tmp_path / "far.nvme", "64MiB")) as node,
        releases.program(release) as program,
    ):
        program.open([node.address], 1, {"transport": "tcp"})
        assert set(program.put(keys)) == {"stored"}
        assert stats(node.address)["nvme_objects"] > 0
        for release_now in (other(release), release):
            releases.become(node, release_now, kill=True)
            assert stats(node.address)["nvme_objects"] > 0
            assert program.sizes(keys) == [len(value_of(key)) for key in keys]
            assert [key for key in keys if program.attempt(["get"], key) != [f"result {value_of(key)!r}"]] == []


@BOTH
def test_names_that_one_release_published_are_read_and_moved_by_the_other(
    releases: Releases, release: str, tmp_path: Path
) -> None:
    registry = str(tmp_path / "names.sqlite")
    with (
        releases.node(other(release)) as node,
        releases.program(release) as first,
        releases.program(other(release)) as second,
    ):
        first.open([node.address], 1, {"registry": registry})
        for number in range(3):
            assert first.publish("a", f"first {number}", None) == number + 1
        assert first.publish("b", "b", None) == 1
        second.open([node.address], 1, {"registry": registry})
        assert second.names() == [["a", 3], ["b", 1]]
        assert second.history("a") == first.history("a")
        assert second.published("a", "first 2", None)
        assert second.published("a", "first 0", 1)
        assert second.publish("a", "second", 3) == 4
        assert first.published("a", "second", None)
        assert first.published("a", "first 1", 2)
        assert first.publish("a", "again", 4) == 5
        assert first.names() == second.names() == [["a", 5], ["b", 1]]
        assert first.history("a") == second.history("a") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kill", [False, True], ids=["terminated", "killed"])
def test_three_nodes_are_upgraded_one_by_one_under_load_and_nothing_is_lost(releases: Releases, kill: bool) -> None:
    with contextlib.ExitStack() as stack:
        nodes: list[RunningNode] = [
            stack.enter_context(releases.node("old", "128MiB", grace=PATIENCE)) for _ in range(3)
        ]
        programs = {release: stack.enter_context(releases.program(release)) for release in ("old", "new")}
        for release, program in programs.items():
            program.open([node.address for node in nodes], 2, {})
            program.lend(nodes[0].address, 4 << 20)
            program.write(f"lease {release}")
            program.work(release)
        go_on(list(programs.values()))
        for node in nodes:
            releases.become(node, "new", kill=kill)
            assert [program.read() for program in programs.values()] == [[], []]
            go_on(list(programs.values()))
        every: list[str] = []
        for program in programs.values():
            confirmed, wrong = program.end()
            assert wrong == []
            assert len(confirmed) >= TURNS * (len(nodes) + 1)
            every += confirmed
        for program in programs.values():
            nothing_missing(program, every)
            assert program.read() == []
