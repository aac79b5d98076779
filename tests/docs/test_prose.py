"""Docstrings begin with a sentence that a newcomer understands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_SOURCE = Path(__file__).parents[2] / "src" / "farpool"
_RIDDLES = ("What ", "Whether ", "Of ", "Such ", "How ", "So much ", "Nobody ")


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those below constants and fields too."""
    for node in ast.walk(tree):
        statements = getattr(node, "body", None)
        for statement in statements if isinstance(statements, list) else []:
            match statement:
                case ast.Expr(ast.Constant(str(text))):
                    yield statement.lineno, text


def test_no_docstring_begins_as_a_riddle() -> None:
    count, found = 0, []
    for file in [*_SOURCE.rglob("*.py"), *_SOURCE.rglob("*.pyi")]:
        for line, text in _docstrings(ast.parse(file.read_text())):
            count += 1
            if text.lstrip().startswith(_RIDDLES):
                found.append(f"{file.relative_to(_SOURCE)}:{line}: {text.splitlines()[0]}")
    assert count > 1000  # they were found
    assert not found, "say what it is, as a noun phrase or a plain sentence:\n" + "\n".join(found)
