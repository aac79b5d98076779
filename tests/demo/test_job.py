from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from farpool.demo.job import run, share_of
from farpool.demo.settings import Settings
from farpool.errors import BudgetError, ConfigError, PoolFullError


def silent(step: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def few(tmp_path: Path) -> Settings:
    """Settings of a demo that need not read the standard library first."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "few.txt").write_text("\n\n".join(["one text", "another text", "some more", "the last one"]))
    return Settings(docs=tmp_path / "docs", texts=4)


def test_a_percentage_is_of_the_weights_and_a_size_is_of_itself() -> None:
    assert share_of("25%", 1000, "--budget") == 250
    assert share_of("12.5 %", 1000, "--budget") == 125
    assert share_of("3 MiB", 1000, "--budget") == 3 << 20


@pytest.mark.parametrize("size", ["", "%", "much", "-5%", "0%", "nan%", "inf%", "0"])
def test_a_wrong_size_is_refused_with_the_name_of_its_option(size: str) -> None:
    with pytest.raises(ConfigError, match="--dram"):
        share_of(size, 1000, "--dram")


@pytest.mark.slow
def test_a_tenth_of_the_weights_gives_the_same_bits(tmp_path: Path) -> None:
    outcome = run(Settings(budget="10%", texts=48, timeline=tmp_path / "timeline.png"), silent)
    assert outcome.equal
    assert outcome.peak_bytes <= outcome.budget_bytes == outcome.weight_bytes // 10
    assert outcome.answers
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


@pytest.mark.slow
def test_every_lower_tier_is_read(tmp_path: Path) -> None:
    outcome = run(Settings(texts=33), silent)
    read = {link.source for link in outcome.rest.links if link.nbytes}
    assert {"dram", "nvme"} <= read


@pytest.mark.slow
def test_progress_ends_complete_in_each_step(few: Settings) -> None:
    last: dict[str, tuple[int, int]] = {}

    def progress(step: str, done: int, total: int) -> None:
        last[step] = (done, total)

    run(few, progress)
    assert len(last) >= 4
    assert all(done == total for done, total in last.values())


@pytest.mark.slow
def test_a_budget_that_one_operation_exceeds_names_the_bytes_it_needs() -> None:
    with pytest.raises(BudgetError) as caught:
        run(Settings(budget="512 KiB", texts=4), silent)
    assert caught.value.needed > 512 << 10
    assert str(caught.value.needed) in str(caught.value)


def test_tiers_that_are_too_small_together_are_refused(few: Settings) -> None:
    with pytest.raises(PoolFullError):
        run(dataclasses.replace(few, dram="10%", nvme="10%"), silent)


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"question": "  "}, "--question"),
        ({"texts": 0}, "--texts"),
        ({"budget": "a lot"}, "--budget"),
        ({"docs": Path("/nowhere")}, "--docs"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], option: str, few: Settings) -> None:
    with pytest.raises(ConfigError, match=option):
        run(dataclasses.replace(few, **wrong), silent)
