"""Counts what makes prose hard to read: words and turns of phrase that hide who acts.

``python -m tests.docs.prose`` prints, for each room, how many words it has and how often each marker occurs;
``python -m tests.docs.prose ROOM`` prints each place in a room.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKERS = {
    "riddle words": r"\b(?:anew|for ever|whoever|nobody|beside|meanwhile|lies)\b",
    "clauses as nouns": r"\bwhat (?:is|are|was|were|has|have|had|lies|lay|comes|came|goes|went|stays|stayed|stands|"
    r"fits|belongs|needs|takes|holds|leaves|remains)\b(?![^.]*\?)",
    "those of, that of": r"\b(?:those|that) of\b",
}
"""Regular expressions of the markers, by name. A question, such as "What is a tier?", is no marker."""
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in MARKERS.items()}
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_SENTENCE_WORDS_MIN = 3
"""A string with fewer words is a name, not a message or a help text."""
_COMMENT = re.compile(r"(?:^ *|  )#:? (.*)$")
"""A comment in Python. A tokenizer would be exact, and take five times as long."""
_CPP = re.compile(r'//([^\n]*)|/\*(.*?)\*/|R"\((.*?)\)"|"((?:[^"\\\n]|\\.)*)"|\'(?:[^\'\\\n]|\\.)\'', re.DOTALL)
_NOT_PROSE = re.compile(r"^```.*?^```|^~~~.*?^~~~|`[^`\n]*`|\]\([^)]*\)|^    .*?$", re.DOTALL | re.MULTILINE)
"""Code blocks, code in a line, link targets and indented blocks of a page."""


@dataclass
class Room:
    """Prose of a folder.

    Attributes
    ----------
    words : int
        Number of its words.
    found : dict
        Places of each marker: file, line and the text around it.
    """

    words: int = 0
    found: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in MARKERS})

    @property
    def counts(self) -> tuple[int, ...]:
        """How often each marker occurs, in the order of `MARKERS`."""
        return tuple(len(places) for places in self.found.values())

    def add(self, where: str, text: str) -> None:
        """Count a piece of prose."""
        text = " ".join(text.split())
        self.words += len(_WORD.findall(text))
        for name, pattern in _PATTERNS.items():
            for match in pattern.finditer(text):
                around = text[max(0, match.start() - 50) : match.end() + 50]
                self.found[name].append(f"{where}: ...{around}...")


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    """Yield the docstrings among some nodes, including docstrings below constants and fields."""
    for node in nodes:
        statements = getattr(node, "body", None)
        for statement in statements if isinstance(statements, list) else []:
            match statement:
                case ast.Expr(ast.Constant(str()) as text):
                    yield text


def _python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings, comments and strings that are sentences."""
    nodes = list(ast.walk(ast.parse(source)))
    said = set()
    for text in docstrings(nodes):
        said.add(id(text))
        yield text.lineno, str(text.value)
    for node in nodes:
        match node:
            case ast.JoinedStr(values):
                parts = [part for part in values if isinstance(part, ast.Constant)]
                said.update(map(id, parts))
                string = " ".join(str(part.value) for part in parts)
            case ast.Constant(str(string)) if id(node) not in said:
                pass
            case _:
                continue
        if len(_WORD.findall(string)) >= _SENTENCE_WORDS_MIN:
            yield node.lineno, string
    lines = source.splitlines()
    yield from _joined([(number, match[1]) for number, line in enumerate(lines, 1) if (match := _COMMENT.search(line))])


def _cpp(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of comments and of strings that are sentences."""
    comments: list[tuple[int, str]] = []
    for match in _CPP.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        if match[1] is not None:
            comments.append((line, match[1].lstrip("/ ")))
            continue
        text = match[2] or match[3] or match[4] or ""
        if match[2] or len(_WORD.findall(text)) >= _SENTENCE_WORDS_MIN:
            yield line, text
    yield from _joined(comments)


def _joined(comments: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join comments of consecutive lines, because a sentence may go over several."""
    first, last, texts = 0, -1, list[str]()
    for line, text in comments:
        if line != last + 1 and texts:
            yield first, " ".join(texts)
            texts = []
        if not texts:
            first = line
        last = line
        texts.append(text)
    if texts:
        yield first, " ".join(texts)


def _page(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of a page's paragraphs, without code."""
    text = _NOT_PROSE.sub(lambda match: "\n" * match[0].count("\n"), source)
    for match in re.finditer(r"(?:[^\n]+\n?)+", text):
        yield text.count("\n", 0, match.start()) + 1, match[0]


READERS = {".py": _python, ".c": _cpp, ".cpp": _cpp, ".hpp": _cpp, ".md": _page}


def _files() -> Iterator[tuple[str, Path]]:
    """Yield each file with its room: a wing of the package, a folder of the native core, the benchmarks, the pages."""
    package, native, benchmarks = ROOT / "src/farpool", ROOT / "native", ROOT / "benchmarks"
    for file in sorted(package.rglob("*.py")):
        inside = file.relative_to(package).parts
        yield f"farpool/{inside[0]}" if len(inside) > 1 else "farpool", file
    for file in sorted([*native.rglob("*.cpp"), *native.rglob("*.hpp")]):
        yield f"native/{file.relative_to(native).parts[0]}", file
    for file in sorted([*benchmarks.rglob("*.py"), *benchmarks.rglob("*.c"), benchmarks / "README.md"]):
        yield "benchmarks", file
    for file in sorted([*(ROOT / "docs").rglob("*.md"), *package.rglob("*.md")]):
        yield "docs", file
    yield "README.md", ROOT / "README.md"


@cache
def rooms() -> dict[str, Room]:
    """Count the prose of all rooms."""
    found: dict[str, Room] = {}
    for name, file in _files():
        room = found.setdefault(name, Room())
        for line, text in READERS[file.suffix](file.read_text()):
            room.add(f"{file.relative_to(ROOT)}:{line}", text)
    return found


if __name__ == "__main__":
    everything = rooms()
    if len(sys.argv) > 1:
        for marker, places in everything[sys.argv[1]].found.items():
            print(marker, *places, sep="\n    ")
    else:
        for name, room in everything.items():
            print(f"{name!r}: {room.counts},  # {room.words} words")
        total = [sum(counts) for counts in zip(*(room.counts for room in everything.values()), strict=True)]
        print(*(f"{one / sum(room.words for room in everything.values()) * 1000:.2f}" for one in total), "per 1,000")
