"""The documentation is whole: every public name has its place, every quoted message is one that farpool says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import farpool
from farpool import errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ERRORS = (DOCS / "errors.md").read_text()
QUOTED = re.findall(r"^\| `([^`]+)` \|", ERRORS, re.MULTILINE)


def _text(node: ast.AST) -> str | None:
    """The text of a string in the sources, with an ellipsis for each value that is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
    return None


def _strings() -> set[str]:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "src/farpool").rglob("*.py"))
    native = (path.read_text() for path in (ROOT / "native").rglob("*.cpp"))
    said = {text for source in native for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', source)}
    return said | {text for tree in trees for node in ast.walk(tree) if (text := _text(node)) is not None}


@pytest.mark.slow
def test_every_quoted_message_is_said_somewhere() -> None:
    sources = "\0".join(_strings())
    assert len(QUOTED) > 30
    assert [message for message in QUOTED if message not in sources] == []


def test_every_error_is_explained() -> None:
    assert [name for name in errors.__all__ if name not in ERRORS] == []


def test_every_public_name_has_a_place_in_the_reference() -> None:
    pages = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    missing = [
        name
        for name in farpool.__all__
        if name not in errors.__all__ and not re.search(rf"auto\w+:: (farpool\.)?{name}$", pages, re.MULTILINE)
    ]
    assert not missing


def test_every_page_is_in_the_contents() -> None:
    index = (DOCS / "index.md").read_text()
    missing = [page.stem for page in DOCS.glob("*.md") if page.stem != "index" and f"\n{page.stem}\n" not in index]
    assert not missing
