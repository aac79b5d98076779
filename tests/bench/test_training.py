"""The training benchmark, small, as a user runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from farpool.errors import ConfigError
from farpool_bench import harness
from farpool_bench.stack import Stack, Trainer
from farpool_bench.training import Bench
from farpool_bench.training_cases import open_rivals
from tests.bench.command import command


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
    done = command("bench", "training", "--quick", "--json", "--report", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "result.json"
    file.write_text(done.stdout)
    section = harness.Result.read(file)
    assert section.benchmark.name == "training"
    (case,) = section.outcome.cases
    assert case.equal
    assert case.peak_bytes <= case.budget_bytes
    assert case.budget_bytes == pytest.approx(case.state_bytes / 6, abs=1)
    weights = case.state_bytes // 4
    # Weights, gradients and moments are read, and all but the gradients written, by the optimizer alone.
    assert case.fewest_read > 2 * weights
    assert case.fewest_written > 2 * weights
    assert case.moved_read > case.fewest_read // 2
    assert sum(phase.read for phase in case.phases) == case.moved_read
    assert [phase.name for phase in case.phases] == ["forward", "backward", "optimizer"]
    assert sum(phase.fewest_read for phase in case.phases) == case.fewest_read
    assert case.phases[2].fewest_written > case.fewest_written // 2
    assert case.efficiency_by_phases >= case.efficiency
    assert {"reading", "writing", "computing"} <= set(case.strip.lanes)
    assert (tmp_path / "page.html").read_text().count("<svg") == 2


@pytest.mark.slow
def test_a_loss_that_differs_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: torch.nn.Module, pool: object) -> torch.nn.Module:
        with torch.no_grad():
            next(module.parameters()).mul_(1.5)
        return offload(module, pool)

    from farpool_bench import training_cases

    offload = training_cases.offload
    monkeypatch.setattr(training_cases, "offload", wrong)
    with pytest.raises(RuntimeError, match="the loss of step 0"):
        Bench(**Bench.QUICK).run(silent)


def test_a_trainer_makes_the_loss_smaller() -> None:
    model = Stack(2, 128)
    trainer = Trainer(model, model.inputs(16))
    losses = [trainer.step().loss.item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_peers_that_need_a_gpu_are_null_with_the_reason() -> None:
    plain = Stack(1, 128)
    with ExitStack() as stack:
        _, *others = open_rivals(stack, plain, plain.inputs(16))
        for rival in others:
            rival.sample()
            peer = rival.row([1.0], [1.0])
            assert peer.seconds is None
            assert peer.remark is not None
            assert "GPU" in peer.remark


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        Bench(device="cuda").run(silent)
