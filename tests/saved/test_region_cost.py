"""The choice by cost between keeping a region's saved tensors and computing it again, on made-up measurements."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from farpool.tensors.region_cost import Choice, Direction, Region, Traffic, decide, report
from farpool.tensors.saving_steps import Step

MB = 10**6
FREE = Direction(-(10**12), 0.0, 1.0)


def region(name: str, seconds: float, nbytes: int, calls: int = 1, **more: Choice) -> Region:
    return Region(name, seconds=seconds, nbytes=nbytes, calls=calls, **more)


def traffic(copy_rate: float, out: Direction = FREE, back: Direction = FREE, **more: float) -> Traffic:
    return Traffic(int(more.get("room", 10**12)), copy_rate, more.get("wait_rate", 0.0), out, back)


def choices(regions: list[Region], told: Traffic) -> list[bool]:
    decide(regions, told)
    return [one.kept for one in regions]


def test_a_region_is_kept_if_copies_take_less_than_computing() -> None:
    told = traffic(1e-9)  # 1 ms for each MB
    assert choices([region("long", 0.002, MB), region("short", 0.0005, MB), region("calls", 0.002, MB, 7)], told) == [
        True,
        False,
        True,
    ]
    assert choices([region("nothing saved", 0.0, 0)], told) == [True]


def test_transfers_are_free_until_the_link_is_full() -> None:
    # Ten regions of 1 MB. A megabyte takes 10 ms, and 45 ms of computing hide four and a half of them.
    out = Direction(0, 1e-8, 0.045)
    regions = [region(str(number), 0.004 + 1e-6 * number, MB) for number in range(10)]
    assert choices(regions, traffic(0.0, out)) == [False] * 6 + [True] * 4
    assert [one.waits for one in regions[5:7]] == pytest.approx([0.005, 0.0])
    # Half of the fifth one is hidden: worth it for 6 ms of computing, and the sixth one is not.
    regions = [region(str(number), 0.006 + 1e-6 * number, MB) for number in range(10)]
    assert choices(regions, traffic(0.0, out)) == [False] * 5 + [True] * 5
    # Computing that takes longer than the link is worth a full link.
    assert all(choices([region(str(number), 0.011, MB) for number in range(10)], traffic(0.0, out)))


def test_bytes_that_fit_into_the_fast_tier_do_not_wait_and_others_have_used_the_link_before() -> None:
    regions = [region(str(number), 0.004, MB) for number in range(4)]
    assert choices(regions, traffic(0.0, Direction(-2 * MB, 1e-8, 0.0))) == [True, True, False, False]
    regions = [region(str(number), 0.004, MB) for number in range(4)]
    assert choices(regions, traffic(0.0, Direction(3 * MB, 1e-8, 0.05))) == [True, True, False, False]
    regions = [region(str(number), 0.004, MB) for number in range(4)]
    assert choices(regions, traffic(0.0, FREE, Direction(5 * MB, 1e-8, 0.03))) == [False] * 4


def test_waiting_that_was_seen_counts_though_the_link_is_not_full() -> None:
    out = Direction(0, 1e-10, 1.0)
    assert choices([region("one", 0.004, MB)], traffic(0.0, out, wait_rate=3e-9)) == [True]
    assert choices([region("one", 0.004, MB)], traffic(0.0, out, wait_rate=5e-9)) == [False]


def test_regions_of_the_most_computing_for_a_byte_come_first_and_the_room_is_a_bound() -> None:
    regions = [region("large", 0.03, 20 * MB), region("small", 0.02, MB), region("middle", 0.02, 3 * MB)]
    assert choices(regions, traffic(0.0, room=5 * MB)) == [False, True, True]


def test_a_choice_changes_only_if_the_other_one_costs_much_less() -> None:
    one = region("one", 0.010, MB)
    found = []
    for cost in (0.009, 0.012, 0.013, 0.011, 0.009, 0.0081, 0.0079, 0.012):  # milliseconds: 9, 12 and so on
        found += choices([one], traffic(cost / MB))
    assert found == [True, True, False, False, False, False, True, True]
    again = region("one", 0.010, MB)
    assert choices([again], traffic(0.012 / MB)) == [False]


def test_a_region_that_was_not_measured_stays_and_one_that_changes_buffers_is_kept() -> None:
    buffers, unknown = region("buffers", 0.0, 0, choice=Choice.ALWAYS), Region("unknown", calls=1)
    assert choices([buffers, unknown], traffic(1.0)) == [True, False]
    assert unknown.choice is Choice.MEASURE
    told = report([buffers, unknown], None).splitlines()
    assert told[1].endswith("kept, as it changes buffers")
    assert told[2].endswith("computed again, to measure it")


def test_the_report_has_costs_and_choices() -> None:
    regions = [region("Block [8, 256]", 0.004, 1 << 20, 2), region("Head [8, 256]", 0.0001, 1 << 20)]
    told = traffic(1e-9, Direction(-(1 << 20), 1e-9, 0.02), Direction(1 << 20, 0.0, 0.04))
    decide(regions, told)
    lines = report(regions, told).splitlines()
    assert " ".join(lines[1].split()) == "Block [8, 256] 2 8.00 ms 2 MiB 2.10 ms 0.00 ms kept"
    assert " ".join(lines[2].split()) == "Head [8, 256] 1 0.10 ms 1 MiB 1.05 ms 0.00 ms computed again"
    assert "954 MiB/s" in lines[3]
    assert lines[4] == "to lower tiers: 954 MiB/s, behind 20.00 ms of computing; 1 MiB fit without"
    assert lines[5] == "back: not measured, behind 40.00 ms of computing; 1 MiB move anyway"


def test_a_graph_that_is_gone_through_again_and_again_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr("farpool.tensors.saving_steps.time.perf_counter", lambda: float(next(clock)))
    step = Step(torch.device("cpu"))
    for _ in range(3):
        step.saved(step.mark())
    step.end_forward()
    for _ in range(100):
        step.read(step.mark())
    # Each copy takes one second: three into the pool, and three out of it.
    assert step.times()[0] == 6.0
