"""Several processes publish under one name, and one is killed: each version has one publisher and one predecessor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from farpool.cluster.names import Names
from tests.store.names.folder_store import FolderStore

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_each_version_has_one_publisher_and_follows_the_expected_version(place: str, tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    objects.mkdir()
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.store.names.publisher",
                place,
                str(objects),
                f"p{i}",
                "15" if i else "100000",
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    try:
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        for one in started:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        victim = started[0]
        assert victim.stdout is not None
        told = [victim.stdout.readline() for _ in range(8)]
        victim.kill()
        told += [*victim.stdout]  # `communicate` alone would lose what `readline` has buffered
        victim.communicate(timeout=60)
        for one in started[1:]:
            told += one.communicate(timeout=240)[0].splitlines()
            assert one.returncode == 0
    finally:
        for one in started:
            one.kill()
            one.wait(60)
    turns = [json.loads(line) for line in told if line.endswith(("]", "]\n"))]
    made = {version: (seen, mark) for seen, mark, version in turns if version}
    assert made
    assert len(made) == sum(1 for turn in turns if turn[2]), "two publishes made one version"
    assert all(version == seen + 1 for version, (seen, _) in made.items())
    with Names(FolderStore(objects), place, hold=0.0, timeout=120.0) as names:
        history = {info.version: info for info in names.history("contested")}
        assert sorted(history) == list(range(1, len(history) + 1))
        for version, (_, mark) in made.items():
            assert history[version].writer == mark.partition("/")[0]
        unknown = set(history) - set(made)  # the victim may have died before it printed its last publish
        assert len(unknown) <= 1
        assert all(history[version].writer == "p0" for version in unknown)
        last = max(history)
        with names.open("contested") as opened:
            assert opened.info.version == last
            assert last in unknown or opened.read().decode() == made[last][1]
