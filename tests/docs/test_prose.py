"""Prose that a newcomer understands at first reading: how docstrings begin, and how often markers of riddles occur."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.docs.prose import MARKERS, READERS, Room, docstrings, rooms

_SOURCE = Path(__file__).parents[2] / "src" / "farpool"
_RIDDLES = ("What ", "Whether ", "Of ", "Such ", "How ", "So much ", "Nobody ")

MARKERS_PER_1000_WORDS_MAX = 0.2
LEFT: dict[str, tuple[int, ...]] = {}
"""Occurrences of each marker in rooms that are still to be rewritten. Numbers only go down, and no room is added."""


def test_no_docstring_begins_as_a_riddle() -> None:
    count, found = 0, []
    for file in [*_SOURCE.rglob("*.py"), *_SOURCE.rglob("*.pyi")]:
        for text in docstrings(ast.walk(ast.parse(file.read_text()))):
            count += 1
            first = str(text.value).lstrip()
            if first.startswith(_RIDDLES):
                found.append(f"{file.relative_to(_SOURCE)}:{text.lineno}: {first.splitlines()[0]}")
    assert count > 1000  # they were found
    assert not found, "say what it is, as a noun phrase or a plain sentence:\n" + "\n".join(found)


def test_rooms_stay_within_their_budgets_of_markers() -> None:
    faults = []
    for name, room in rooms().items():
        left = LEFT.get(name, (0,) * len(MARKERS))
        for (marker, places), most in zip(room.found.items(), left, strict=True):
            if len(places) > max(most, MARKERS_PER_1000_WORDS_MAX * room.words / 1000):
                faults += [f"{name}: {len(places)} {marker} in {room.words} words, at most {most}:", *places]
    assert not faults, "say who does what, in ordinary words (CONTRIBUTING.md, Style):\n" + "\n".join(faults)


def test_the_table_of_rooms_shrinks() -> None:
    found = rooms()
    stale = {
        name: found[name].counts if name in found else None
        for name, counts in LEFT.items()
        if name not in found or found[name].counts != counts
    }
    assert not stale, f"LEFT can go down: put these numbers in it, and remove rooms that are gone or within: {stale}"
    done = [
        name
        for name in LEFT
        if all(count <= MARKERS_PER_1000_WORDS_MAX * found[name].words / 1000 for count in found[name].counts)
    ]
    assert not done, f"these rooms are done; remove them from LEFT: {done}"


@pytest.mark.parametrize(
    ("suffix", "source", "counts"),
    [
        (".py", '"""Nobody saves it anew."""', (2, 0, 0)),
        (".py", "# It is what\n# has to leave, and that of others.\n", (0, 1, 1)),
        (".py", 'raise ValueError(f"{size} is beside what is here")', (1, 1, 0)),
        (".py", 'mode = "lies"', (0, 0, 0)),
        (".cpp", 'int lies = 1; // whoever asks\n// for ever\nsay("those of others go");', (2, 0, 1)),
        (".md", "What is a tier? It `lies` there.\n\n```\nanew\n```\n", (0, 0, 0)),
    ],
)
def test_the_counter_finds_prose(suffix: str, source: str, counts: tuple[int, ...]) -> None:
    room = Room()
    for line, text in READERS[suffix](source):
        room.add(str(line), text)
    assert room.counts == counts
