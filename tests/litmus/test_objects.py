"""What a reader may see of objects (docs/memory-model.md, rules O1 to O7)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode
from tests.litmus.conftest import Programs
from tests.litmus.threads import PATIENCE_S, awaited, together

KIB = 1024


def test_o1_all_readers_see_the_same_whole_value_of_a_key_that_two_programs_put(programs: Programs) -> None:
    one, two, first, second = programs(4)

    def put(store: Store, letter: bytes) -> list[str]:
        return [store.put(f"o1/{turn}", letter * 5000) for turn in range(30)]

    def read(store: Store) -> list[bytes]:
        seen = []
        for turn in range(30):
            value = awaited(lambda turn=turn: store.get(f"o1/{turn}"))  # type: ignore[misc]
            # From then on, it neither changes nor disappears.
            assert all(store.get(f"o1/{turn}") == value for _ in range(5))
            seen.append(value)
        return seen

    outcomes, others, *reads = together(
        lambda: put(one, b"a"), lambda: put(two, b"b"), lambda: read(first), lambda: read(second)
    )
    for turn, (outcome, other) in enumerate(zip(outcomes, others, strict=True)):
        assert {outcome, other} == {"stored", "present"}
        stored = (b"a" if outcome == "stored" else b"b") * 5000
        assert [seen[turn] for seen in reads] == [stored, stored]


def test_o2_a_put_that_has_returned_is_seen_by_each_read_that_begins_later(programs: Programs) -> None:
    writer, reader = programs(2)
    turns = 100

    def write() -> None:
        for turn in range(turns):
            writer.put(f"o2/data/{turn}", b"%d" % turn * 1000)
            writer.put(f"o2/flag/{turn}", b"")

    def read() -> None:
        for turn in range(turns):
            awaited(lambda turn=turn: reader.get(f"o2/flag/{turn}"))  # type: ignore[misc]
            assert reader.get(f"o2/data/{turn}") == b"%d" % turn * 1000
            assert reader.lookup([f"o2/data/{turn}"]).leading == 1

    together(write, read)


def test_o2_another_process_sees_it_too(programs: Programs, node: RunningNode) -> None:
    (writer,) = programs(1)
    program = (
        "import sys, farpool\n"
        "with farpool.Store(sys.argv[1], timeout=30) as store:\n"
        "    for key in sys.stdin:\n"
        "        print(store.get(key.strip()), flush=True)\n"
    )
    command = [sys.executable, "-c", program, node.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        for turn in range(20):
            writer.put(f"o2/process/{turn}", b"%d" % turn)
            print(f"o2/process/{turn}", file=other.stdin, flush=True)
            assert other.stdout.readline() == f"{b'%d' % turn}\n"
            writer.drop(f"o2/process/{turn}")
            print(f"o2/process/{turn}", file=other.stdin, flush=True)
            assert other.stdout.readline() == "None\n"
        other.stdin.close()
        assert other.wait(PATIENCE_S) == 0


def test_o3_after_a_drop_has_returned_no_read_sees_the_value_and_a_new_one_may_be_put(programs: Programs) -> None:
    writer, reader = programs(2)
    for turn in range(50):
        assert writer.put("o3", b"%d" % turn) == "stored"
        assert reader.get("o3") == b"%d" % turn
        assert writer.drop("o3")
        assert reader.get("o3") is None
        assert reader.lookup(["o3"]).leading == 0


def test_o3_a_reader_during_drops_and_puts_never_goes_back_to_a_dropped_value(programs: Programs) -> None:
    writer, reader = programs(2)
    turns = 150

    def write() -> None:
        for turn in range(turns):
            writer.put("o3/race", b"%d" % turn * 500)
            if turn < turns - 1:
                writer.drop("o3/race")

    def read() -> list[int]:
        seen = [-1]
        while seen[-1] < turns - 1:
            value = awaited(lambda: reader.get("o3/race"))
            number = int(value[: len(value) // 500])
            assert value == b"%d" % number * 500
            assert number >= seen[-1]
            seen.append(number)
        return seen

    _, seen = together(write, read)
    assert seen[-1] == turns - 1


def test_o4_an_evicted_object_is_missing_and_never_another_value_and_a_kept_one_stays(programs: Programs) -> None:
    writer, reader = programs(2)
    writer.put("o4/kept", b"kept" * KIB)
    writer.touch("o4/kept", None, keep=True)
    for number in range(80):
        writer.put(f"o4/{number}", b"%02d" % number * 256 * KIB)  # 40 MiB, more than the node has
    found = {number: reader.get(f"o4/{number}") for number in range(80)}
    assert None in found.values()
    assert all(value in (None, b"%02d" % number * 256 * KIB) for number, value in found.items())
    assert reader.get("o4/kept") == b"kept" * KIB
    writer.touch("o4/kept", 1.0, keep=False)
    for number in range(80):
        writer.drop(f"o4/{number}")


def test_o5_after_a_rotation_no_program_reads_an_older_object_and_a_pin_keeps_its_bytes(programs: Programs) -> None:
    writer, reader = programs(2)
    writer.put("o5", b"old" * 1000)
    assert reader.get("o5") == b"old" * 1000
    with reader.pin("o5") as held:
        writer.rotate_tenant()
        assert reader.get("o5") is None
        assert reader.lookup(["o5"]).leading == 0
        assert writer.put("o5", b"new" * 1000) == "stored"
        assert reader.get("o5") == b"new" * 1000
        assert held.view == b"old" * 1000


def test_o5_a_rotation_during_reads_lets_no_program_go_back(programs: Programs) -> None:
    writer, reader = programs(2)
    turns = 8

    def write() -> None:
        for turn in range(turns):
            writer.put("o5/race", b"%d" % turn * 500)
            writer.rotate_tenant()
        writer.put("o5/race", b"%d" % turns * 500)

    def read() -> None:
        last = -1
        while last < turns:
            value = awaited(lambda: reader.get("o5/race"))
            assert value == value[:1] * 500
            assert int(value[:1]) >= last
            last = int(value[:1])

    together(write, read)


@pytest.mark.parametrize("keys", [2, 40])
def test_o6_a_batch_is_no_transaction_but_each_of_its_values_is_whole(programs: Programs, keys: int) -> None:
    writer, reader = programs(2)
    turns = 20

    def write() -> None:
        for turn in range(turns):
            writer.put_many([(f"o6/{keys}/{turn}/{key}", b"%d" % turn * 400) for key in range(keys)])

    def read() -> None:
        for turn in range(turns):
            names = [f"o6/{keys}/{turn}/{key}" for key in range(keys)]
            values: list[bytes | None] = [None]
            while None in values:
                values = reader.get_many(names)
                assert all(value in (None, b"%d" % turn * 400) for value in values)

    together(write, read)


def test_o7_a_time_to_live_ends_for_all_programs_and_is_never_shortened_by_a_put(programs: Programs) -> None:
    writer, reader = programs(2)
    writer.put("o7/short", b"value", ttl=0.05)
    writer.put("o7/long", b"value", ttl=1000)
    assert writer.put("o7/long", b"value", ttl=0.01) == "present"
    awaited(lambda: True if reader.get("o7/short") is None else None)
    # Once one program has seen its end, no other one sees it again.
    assert writer.get("o7/short") is None
    assert writer.get("o7/long") == reader.get("o7/long") == b"value"
