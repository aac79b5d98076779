"""``farpool sim``."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from farpool.cli.main import app
from farpool.cluster.node import claims
from farpool.errors import ConfigError


def test_one_seed_prints_its_log() -> None:
    done = CliRunner().invoke(app, ["sim", "--seed", "3", "--steps", "20"])
    assert done.exit_code == 0, done.output
    assert "node1 starts" in done.output
    assert "all faults end" in done.output
    assert "seed 3: " in done.output


def test_json_has_the_plan_the_counts_and_the_log() -> None:
    done = CliRunner().invoke(app, ["sim", "--seed", "3", "--steps", "20", "--json"])
    found = msgspec.json.decode(done.output)
    assert found["seed"] == 3
    assert found["violation"] is None
    assert len(found["steps"]) == 20
    assert found["counts"]["events"] > 100
    assert any("node1 starts" in line for line in found["log"])


def test_many_seeds_are_counted() -> None:
    done = CliRunner().invoke(app, ["sim", "--seeds", "3:6", "--steps", "10"])
    assert done.exit_code == 0, done.output
    assert "3 runs kept all rules: " in done.output
    found = msgspec.json.decode(CliRunner().invoke(app, ["sim", "--seeds", "3:6", "--steps", "10", "--json"]).output)
    assert (found["seeds"], found["runs"]) == ([3, 6], 3)


@pytest.mark.slow
def test_the_first_failure_ends_the_runs_and_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "check_ticket", lambda ticket, **given: 1000.0)
    done = CliRunner().invoke(app, ["sim", "--seeds", "0:200", "--json"])
    assert done.exit_code == 1
    found = msgspec.json.decode(done.output)
    assert found["violation"]["rule"] in ("expiry", "holder")
    assert len(found["steps"]) < 40
    assert any("a rule is broken" in line for line in found["log"])


@pytest.mark.parametrize("given", [[], ["--seed", "1", "--seeds", "1:2"], ["--seeds", "5"], ["--seeds", "5:5"]])
def test_wrong_seeds_are_refused(given: list[str]) -> None:
    done = CliRunner().invoke(app, ["sim", *given])
    assert isinstance(done.exception, ConfigError)
    assert "--seed" in str(done.exception)
