"""The streaming benchmark, small, as a user runs it."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from farpool.errors import ConfigError
from farpool_bench import harness
from farpool_bench.stack import Stack
from farpool_bench.streaming import Bench
from tests.bench.command import command

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def silent(step: str, done: int, total: int) -> None:
    pass


@pytest.mark.slow
def test_the_command_measures_and_its_result_can_be_read_again(tmp_path: Path) -> None:
    done = command("bench", "streaming", "--quick", "--json", "--report", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "result.json"
    file.write_text(done.stdout)
    section = harness.Result.read(file)
    assert section.benchmark.name == "streaming"
    (case,) = section.outcome.cases
    assert case.equal
    assert case.peak_bytes <= case.budget_bytes == case.weight_bytes // 4
    assert case.moved_bytes > case.fewest_bytes // 2
    assert case.fewest_bytes >= case.weight_bytes - case.budget_bytes
    assert case.transfer_seconds == pytest.approx(case.fewest_bytes / case.rate)
    assert len(case.beside_copies_seconds) == len(case.paged_seconds)
    assert case.prefetches_used + case.prefetches_wasted > 0
    assert {"reading", "computing"} <= set(case.strip.lanes)
    assert (tmp_path / "page.html").read_text().count("<svg") == 2


@pytest.mark.slow
def test_no_pass_is_faster_than_the_link_lets_it_be() -> None:
    (case,) = Bench(**Bench.QUICK).run(silent).cases
    demand = case.peers[0]
    assert demand.seconds is not None
    assert min(demand.seconds) > (case.weight_bytes - case.budget_bytes) / case.rate


@needs_accelerate
def test_accelerate_runs_in_the_same_round() -> None:
    (case,) = Bench(**Bench.QUICK).run(silent).cases
    peer = case.peers[1]
    assert peer.name.startswith("accelerate ")
    assert peer.seconds is not None
    assert len(peer.seconds) == len(case.paged_seconds)
    assert min(peer.seconds) > case.weight_bytes / case.rate


@needs_accelerate
def test_accelerate_gives_the_same_bits_and_holds_no_weight_between_passes() -> None:
    from farpool_bench.streaming_cases import accelerated

    plain = Stack(2, 128)
    inputs = plain.inputs(16)
    model = accelerated(plain, "cpu", 1e9)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(inputs), plain(inputs))
            assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_a_paced_weight_takes_its_bytes_over_the_rate() -> None:
    from farpool_bench.streaming_cases import PacedWeights

    weights = PacedWeights({"weight": torch.arange(25_000, dtype=torch.float32)}, 1e6)
    start = time.perf_counter()
    weight = weights["weight"]
    assert time.perf_counter() - start >= 0.1
    assert torch.equal(weight, torch.arange(25_000, dtype=torch.float32))


def test_a_peer_that_is_not_installed_is_null_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(*arguments: object) -> Stack:
        raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate")

    monkeypatch.setattr("farpool_bench.streaming_cases.accelerated", not_there)
    (case,) = Bench(**Bench.QUICK).run(silent).cases
    peer = case.peers[1]
    assert (peer.seconds, peer.speedup, peer.efficiency) == (None, None, None)
    assert peer.remark is not None
    assert "accelerate" in peer.remark
    assert len(Bench.figures(harness.Row(cases=(case,)))) == 2
    assert any("accelerate" in part for part in Bench.tables(harness.Row(cases=(case,))) if isinstance(part, str))


def test_outputs_that_differ_end_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plain: Stack, *rest: object) -> Stack:
        return Stack(len(plain.blocks), plain.width, seed=7)

    monkeypatch.setattr("farpool_bench.streaming_cases.accelerated", wrong)
    with pytest.raises(RuntimeError, match="accelerate: the outputs differ"):
        Bench(**Bench.QUICK).run(silent)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        Bench(device="cuda").run(silent)
