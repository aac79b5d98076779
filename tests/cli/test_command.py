"""The command in a process of its own, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import farpool


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from farpool.cli.main import main; main()", *arguments]
    return subprocess.run(program, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    done = command("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"farpool {farpool.__version__}\n")


def test_help_names_every_option_of_the_demo(tmp_path: Path) -> None:
    done = command("demo", "--help", cwd=tmp_path)
    assert done.returncode == 0
    for option in ("--budget", "--question", "--docs", "--texts", "--dram", "--nvme", "--timeline", "--json"):
        assert option in done.stdout
    for option in ("--remote", "--starts", "--kv", "--pool"):
        assert option in done.stdout


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    program = "import sys, farpool.cli.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=True)


@pytest.mark.slow
def test_the_demo_gives_the_same_bits_inside_its_budget(tmp_path: Path) -> None:
    done = command("demo", "--texts", "40", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)["result"]
    assert outcome["equal"] is True
    assert 0 < outcome["peak_bytes"] <= outcome["budget_bytes"] < outcome["weight_bytes"] * 0.26
    assert outcome["passages"] == 40
    assert outcome["rest"]["accesses"] > 0
    assert (tmp_path / "farpool-timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_demo_finds_the_users_own_text(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "bread.md").write_text("Knead the dough, let it rest for an hour and bake it until the crust is brown.")
    (docs / "tax.txt").write_text("The declaration is due in May; late ones are charged interest for every month.")
    done = command("demo", "--docs", "docs", "--question", "How do I make bread?", "--timeline", "t.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("bread.md") < done.stdout.index("tax.txt")
    assert "equal" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param(("--budget", "lots"), "--budget 'lots'", marks=pytest.mark.slow),
        pytest.param(("--docs", "nowhere"), "nowhere", marks=pytest.mark.slow),
        pytest.param(("--timeline", "nowhere/t.png"), "nowhere", marks=pytest.mark.slow),
    ],
)
def test_an_error_is_one_line_without_a_traceback(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    done = command("demo", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
