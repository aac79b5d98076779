"""The code in README and guides runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from farpool.cluster.node.process import running_node

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Nodes that a reader has started; here others take their places.
ADDRESS = re.compile(r'"(tcp://127\.0\.0\.1:747\d)"')
# A block of code, and the block of text right behind it, which is what the code prints.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(code, printed, id=f"{page.stem}-{number}", marks=[] if page.stem == "README" else pytest.mark.slow)
    for page in PAGES
    for number, (code, printed) in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_the_example_runs(code: str, printed: str, tmp_path: Path) -> None:
    code = code.replace("/var/tmp/far.pool", str(tmp_path / "far.pool")).replace(
        "/tmp/farpool-example.pt", str(tmp_path / "m.pt")
    )
    with ExitStack() as nodes:
        for address in dict.fromkeys(ADDRESS.findall(code)):
            code = code.replace(address, nodes.enter_context(running_node()).address)
        done = subprocess.run(
            [sys.executable, "-W", "error", "-W", "ignore::FutureWarning:transformers.modeling_utils", "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    if printed:
        assert done.stdout == printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
