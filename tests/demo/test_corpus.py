from __future__ import annotations

from pathlib import Path

import pytest

from farpool.demo.corpus import PASSAGE_CHARACTERS, Passage, folder_passages, library_passages, pick
from farpool.errors import ConfigError


@pytest.fixture(scope="module")
def library() -> list[Passage]:
    return library_passages()


@pytest.mark.slow
def test_the_standard_library_has_hundreds_of_passages_in_a_fixed_order(library: list[Passage]) -> None:
    assert len(library) >= 512
    assert library == library_passages()
    assert "subprocess.run" in {passage.source for passage in library}


def test_no_passage_is_empty_or_longer_than_the_model_reads(library: list[Passage]) -> None:
    assert all(0 < len(passage.text) <= PASSAGE_CHARACTERS for passage in library)


def test_only_text_files_of_a_folder_are_read_in_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("# second\n\nstill second")
    (tmp_path / "a.TXT").write_text("first")
    (tmp_path / "program.py").write_text("no prose")
    assert folder_passages(tmp_path) == [Passage("a.TXT", "first"), Passage("sub/b.md", "# second still second")]


def test_a_long_paragraph_is_cut_between_words_and_loses_none(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(1000)]
    (tmp_path / "long.txt").write_text(" ".join(words))
    pieces = [passage.text for passage in folder_passages(tmp_path)]
    assert " ".join(pieces).split() == words
    assert max(map(len, pieces)) <= PASSAGE_CHARACTERS


def test_text_without_a_space_is_cut_too(tmp_path: Path) -> None:
    (tmp_path / "solid.txt").write_text("x" * 3000)
    assert "".join(passage.text for passage in folder_passages(tmp_path)) == "x" * 3000


@pytest.mark.parametrize("name", ["missing", "empty", "blank"])
def test_a_folder_without_text_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "note.txt").write_text(" \n\n ")
    with pytest.raises(ConfigError, match=name):
        folder_passages(tmp_path / name)


def test_a_pick_is_spread_over_all_passages() -> None:
    passages = [Passage(str(number), "text") for number in range(10)]
    assert [passage.source for passage in pick(passages, 5)] == ["0", "2", "4", "6", "8"]
    assert pick(passages, 10) == pick(passages, 99) == passages
