"""Commands as the guides show them: for each program that one calls, its arguments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_DOCS = Path(__file__).parents[4] / "docs"


def commands(page: str, program: str) -> list[list[str]]:
    """Arguments of each command of a guide that begins with these words, in their order."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (_DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    split = [shlex.split(block.replace("\\\n", " ")) for block in blocks]
    start = program.split()
    return [words[len(start) :] for words in split if words[: len(start)] == start]
