"""Spin goes through all orders of steps of the protocols in models/, and finds each defect that is built into them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.pml"))
SPIN = shutil.which("spin")
COMPILER = shutil.which("gcc")  # spin runs gcc, too
MEMORY_MAX_MB = 1024
DEPTH_MAX = 10_000
PATIENCE_S = 280.0
CASES = {"leases": [{"CAPACITY": "1"}, {"CAPACITY": "2"}], "names": [{}]}
"""Settings with which each model must be right. Each of its defects is found with one of them."""
LEAST_STATES = {"leases": 25_000, "names": 1_000_000}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SPIN is None, reason="spin is not installed (Debian: spin)"),
    pytest.mark.skipif(COMPILER is None, reason="gcc is not installed (Debian: gcc)"),
]


def defects(name: str) -> dict[str, int]:
    """Return the defects of a model, by their names."""
    text = (MODELS / f"{name}.pml").read_text()
    block = text.partition("/* Defects. */\n")[2].partition("\n\n")[0]
    found = re.findall(r"^#define (\w+) (\d+) +/\* .+ \*/$", block, re.MULTILINE)
    assert len(found) == len(block.splitlines()) > 10
    return {defect: int(number) for defect, number in found}


MUTANTS = [(name, defect) for name in NAMES for defect in defects(name)]


@pytest.fixture(scope="module")
def checkers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The programs that Spin makes of the models."""
    made = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(MODELS / f"{name}.pml", folder)
        assert SPIN is not None
        assert COMPILER is not None
        spin = run([SPIN, "-a", f"{name}.pml"], folder)
        assert "rror" not in spin, spin
        memory = f"-DMEMLIM={MEMORY_MAX_MB}"
        output = run([COMPILER, "-O1", "-w", "-DSAFETY", memory, "-o", "pan", "pan.c"], folder)
        assert (folder / "pan").exists(), output
        made[name] = folder
    return made


def run(command: list[str], folder: Path, settings: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(settings or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.stdout


def check(folder: Path, settings: dict[str, str]) -> str:
    return run(["./pan", f"-m{DEPTH_MAX}", "-w23"], folder, settings)


@pytest.mark.parametrize(
    ("name", "settings"), [(name, settings) for name in NAMES for settings in CASES[name]], ids=str
)
def test_each_order_of_steps_keeps_the_promises(checkers: dict[str, Path], name: str, settings: dict[str, str]) -> None:
    output = check(checkers[name], settings)
    assert "errors: 0" in output, output
    assert "assertion violations\t+" in output
    # Otherwise not all orders were seen.
    assert "too small" not in output, output
    assert "reached -DMEMLIM" not in output, output
    states = re.search(r"(\d+) states, stored", output)
    assert states is not None
    assert int(states[1]) >= LEAST_STATES[name]
    # Each step of the model happens in some order. A step that sends nothing has its end in another place.
    unreached = re.findall(r'\.pml:(\d+), state \d+, "(.+)"', output)
    assert [text for _, text in unreached if text != "-end-" and not text.startswith("D_STEP")] == []


@pytest.mark.parametrize(("name", "defect"), MUTANTS)
def test_each_defect_is_found(checkers: dict[str, Path], name: str, defect: str) -> None:
    number = str(defects(name)[defect])
    outputs = (check(checkers[name], {**settings, "DEFECT": number}) for settings in CASES[name])
    assert any("assertion violated" in output for output in outputs)


def test_each_defect_has_a_number_of_its_own_and_is_in_the_model() -> None:
    for name in NAMES:
        text = (MODELS / f"{name}.pml").read_text()
        numbers = defects(name)
        assert sorted(numbers.values()) == list(range(1, len(numbers) + 1))
        for defect in numbers:
            assert re.search(rf"defect [!=]= {defect}\b", text), defect
