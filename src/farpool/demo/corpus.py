"""The text that the demo searches: the installed standard library's documentation, or the user's own files."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from farpool.errors import ConfigError

__all__ = ["Passage", "folder_passages", "library_passages", "pick"]

PASSAGE_CHARACTERS = 900
"""Maximum length of a passage. It is about 200 word pieces of English. The model reads the first 256 word pieces of a
text, so it reads most passages completely."""

DOCSTRING_CHARACTERS_MIN = 150

LIBRARY = (
    *("argparse", "bisect", "calendar", "collections", "concurrent.futures", "configparser", "contextlib", "copy"),
    *("csv", "dataclasses", "datetime", "difflib", "filecmp", "fileinput", "fnmatch", "functools", "getpass", "glob"),
    *("graphlib", "gzip", "hashlib", "heapq", "html", "http.client", "http.server", "imaplib", "inspect", "ipaddress"),
    *("json", "locale", "logging", "lzma", "mimetypes", "os", "pathlib", "pickle", "platform", "pprint", "queue"),
    *("random", "re", "sched", "secrets", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket"),
    *("socketserver", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading"),
    *("timeit", "traceback", "unittest", "urllib", "uuid", "venv", "warnings", "wave", "weakref", "webbrowser"),
    *("wsgiref", "xml", "zipfile", "zoneinfo"),
)


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text.

    Attributes
    ----------
    source : str
        Origin of the text: a dotted Python name, or a path in the user's folder.
    text : str
        The text, without its source.
    """

    source: str
    text: str


def library_passages() -> list[Passage]:
    """Return passages from the docstrings of the modules in `LIBRARY`, in the running Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    return [
        passage
        for name in LIBRARY
        for path in _module_files(root, name)
        for passage in _docstring_passages(path, ".".join(path.relative_to(root).with_suffix("").parts))
    ]


def folder_passages(folder: Path, progress: Callable[[int, int], None] | None = None) -> list[Passage]:
    """Return passages from all ``.txt`` and ``.md`` files under a folder, sorted by path.

    Raises
    ------
    ConfigError
        The folder cannot be read, or none of its files has text.
    """
    if not folder.is_dir():
        raise ConfigError(f"--docs {folder}: not a folder; give one with .txt or .md files")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in {".md", ".txt"} and path.is_file())
    found: list[Passage] = []
    for done, path in enumerate(files, 1):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"--docs {folder}: cannot read {path}: {error.strerror}") from error
        found += (Passage(str(path.relative_to(folder)), piece) for piece in _pieces(text))
        if progress:
            progress(done, len(files))
    if not found:
        raise ConfigError(f"--docs {folder}: no text in it; give a folder with .txt or .md files")
    return found


def pick(passages: list[Passage], count: int) -> list[Passage]:
    """Return `count` passages, evenly spaced over the list; the whole list if it has no more than `count`."""
    if count >= len(passages):
        return passages
    return [passages[index * len(passages) // count] for index in range(count)]


def _module_files(root: Path, name: str) -> list[Path]:
    path = root.joinpath(*name.split("."))
    if path.is_dir():
        return sorted(file for file in path.glob("*.py") if file.stem == "__init__" or not file.stem.startswith("_"))
    file = path.with_suffix(".py")
    return [file] if file.is_file() else []


def _docstring_passages(path: Path, name: str) -> Iterator[Passage]:
    def visit(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[Passage]:
        docstring = ast.get_docstring(node) or ""
        if len(docstring) >= DOCSTRING_CHARACTERS_MIN:
            for piece in _pieces(docstring):
                yield Passage(name, piece)
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith(
                "_"
            ):
                yield from visit(child, f"{name}.{child.name}")

    return visit(ast.parse(path.read_bytes()), name.removesuffix(".__init__"))


def _pieces(text: str) -> Iterator[str]:
    """Split a text into passages. Join paragraphs while they fit; cut a paragraph that is too long between words."""
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        while len(words) > PASSAGE_CHARACTERS:
            cut = words.rfind(" ", 0, PASSAGE_CHARACTERS)
            cut = cut if cut > 0 else PASSAGE_CHARACTERS
            if piece:
                yield piece
                piece = ""
            yield words[:cut]
            words = words[cut:].lstrip()
        if piece and len(piece) + len(words) + 1 > PASSAGE_CHARACTERS:
            yield piece
            piece = ""
        piece = f"{piece} {words}".strip()
    if piece:
        yield piece
