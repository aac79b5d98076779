"""The benchmark of generation with keys and values in a pool, small, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from farpool.errors import ConfigError
from farpool_bench.harness import Result
from farpool_bench.kv_generate import Bench
from tests.bench.command import command


@pytest.mark.slow
def test_the_command_measures_and_its_result_can_be_read_again(tmp_path: Path) -> None:
    done = command("bench", "kv-generate", "--quick", "--json", "--report", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "result.json"
    file.write_text(done.stdout)
    section = Result.read(file)
    assert section.benchmark.name == "kv-generate"
    (case,) = section.outcome.cases
    assert case.equal
    assert case.budget_bytes == case.kv_bytes // 4
    assert case.peak_bytes + case.operand_bytes <= case.budget_bytes
    assert case.fewest_bytes == case.kv_bytes - case.budget_bytes
    assert case.moved_bytes > case.fewest_bytes // 2
    assert case.transfer_seconds == pytest.approx(case.fewest_bytes / case.rate)
    assert len(case.paged_seconds) == len(case.beside_copies_seconds) == len(case.resident_seconds) == 2
    assert [peer.name for peer in case.peers] == ["demand fetching", "transformers' offloaded cache"]
    # Without fetching ahead a token takes at least as long as the link needs.
    assert case.peers[0].seconds is not None
    assert min(case.peers[0].seconds) > case.transfer_seconds
    assert (tmp_path / "page.html").read_text().count("<svg") == 1


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="cpu"):
        Bench(device="gpu").run(lambda step, done, total: None)
