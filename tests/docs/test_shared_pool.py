"""The commands of the page about a shared pool run as they stand, on machines of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.machines import Step, machines, play, steps
from tests.machines import why_not
from tests.registry.cluster import needs_etcd

PAGE = Path(__file__).parents[2] / "docs" / "shared-pool.md"
MISSING = [tool for tool in ("openssl", "curl") if shutil.which(tool) is None]
needs_tools = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
needs_machines = pytest.mark.skipif(bool(reason := why_not(needs_root=True)), reason=reason)


def test_a_page_is_read_as_commands_with_output_and_files() -> None:
    page = (
        "# P\n\n## One\n\n```py\n# work.py, on a\nprint(1)\n```\n\n"
        "```console\na$ cat x \\\n  y &\nready …\nall$ ls\n```\n\n"
        "## Two\n\n```console\n$ no\n```\n"
    )
    found = steps(page, "One")
    assert found == [
        Step("a", file="work.py", text="# work.py, on a\nprint(1)\n"),
        Step("a", "cat x \\\n  y &", ["ready …"]),
        Step("all", "ls"),
    ]
    assert [one.is_server for one in found] == [False, True, False]


@needs_machines
def test_output_that_differs_from_the_page_fails(tmp_path: Path) -> None:
    with machines(tmp_path, "a", "b") as cluster:
        play([Step("a", "x=7"), Step("a", "echo $x b  $(hostname)", ["7 b a"])], cluster)  # the shell is the same
        play(
            [Step("a", "echo hello > file"), Step("a", "scp -r file 10.0.0.2:"), Step("b", "cat file", ["hel…"])],
            cluster,
        )
        play([Step("all", "hostname", ["…"]), Step("b", "(sleep 0.1; echo ready) &", ["ready"])], cluster)
        play([Step("a", "bash -c 'echo > /dev/tcp/10.0.0.2/1' 2>&1 || true", ["… Connection refused"])], cluster)
        for step, part in (
            (Step("a", "echo 8", ["9"]), "did not print"),
            (Step("a", "false"), "ended with 1"),
            (Step("c", "true"), "no machine c"),
            (Step("b", "ls /nowhere"), "No such file"),
        ):
            with pytest.raises(AssertionError, match=part):
                play([step], cluster)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_machines
@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("One machine", ("here",)),
        pytest.param(
            "Three machines",
            ("a", "b", "c"),
            marks=[needs_etcd, needs_tools],
        ),
    ],
)
def test_the_commands_of_the_page_run(section: str, names: tuple[str, ...], tmp_path: Path) -> None:
    found = steps(PAGE.read_text(), section)
    assert len(found) > 2
    with machines(tmp_path, *names) as cluster:
        play(found, cluster)
