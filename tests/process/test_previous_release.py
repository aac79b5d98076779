"""`scripts/previous-release` where it cannot build, and where it has built already."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def script(folder: Path) -> tuple[int, str, str]:
    """Run a folder's own copy of the script; return its exit status, and what it said."""
    done = subprocess.run(
        [folder / "scripts/previous-release"],
        env={**os.environ, "FARPOOL_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose previous release is its first commit."""
    folder = tmp_path / "repository"
    (folder / "scripts").mkdir(parents=True)
    (folder / "tests/upgrade").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/previous-release", folder / "scripts")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    (folder / "tests/upgrade/previous.txt").write_text(f"# why\n{git(folder, 'rev-parse', 'HEAD')} the first\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "second")
    return folder


def test_a_shallow_clone_says_what_it_lacks(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD~1")
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "clone")
    status, said, reason = script(tmp_path / "clone")
    assert (status, said) == (3, "")
    assert f"this clone is shallow and lacks the previous release {commit}; run 'git fetch --unshallow'" in reason


def test_a_folder_without_the_history_says_so(repository: Path) -> None:
    shutil.rmtree(repository / ".git")
    status, said, reason = script(repository)
    assert (status, said) == (3, "")
    assert "clone the repository with its history" in reason


def test_a_file_that_names_no_commit_is_an_error(repository: Path) -> None:
    (repository / "tests/upgrade/previous.txt").write_text("b9e99e3 too short\n")
    status, _, reason = script(repository)
    assert status == 1
    assert "must name one commit, by its 40 digits" in reason


@pytest.mark.slow
def test_a_release_that_cannot_be_built_is_an_error_and_does_not_count_as_finished(repository: Path) -> None:
    status, said, reason = script(repository)  # the commit has no package in it
    assert (status, said) == (1, "")
    assert "building the previous release" in reason
    assert "pyproject.toml" in reason
    assert not list((repository / "build/previous-release").glob("*/finished"))
