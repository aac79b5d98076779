"""Requests as files hold them: JSON lines or an engine's log, plain or compressed, read line by line.

Objects with ``hash_ids``, ``input_length``, ``output_length`` and ``timestamp`` are Mooncake's traces and vLLM's timed
traces; only ``hash_ids`` is needed. Names of blocks are only compared: whole numbers of any size, or texts such as
hexadecimal digests. Objects with ``token_ids``, ``prompt_token_ids`` or ``tokens``, and plain lists of numbers, are
prompts. Engines' own logs are read if they have the token ids of prompts: vLLM's (``--enable-log-requests`` at level
DEBUG) and SGLang's (``--log-requests --log-requests-level 3 --log-requests-format json``); other lines of a log are
skipped.

A file that gzip or zstd has compressed is recognised by its first bytes, whatever its name.
"""

from __future__ import annotations

import csv
import itertools
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from farpool.errors import ConfigError

GZIP_MAGIC = b"\x1f\x8b"
"""First bytes of every file that gzip writes."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
"""First bytes of every file that zstd writes."""
_MARK = b"\xef\xbb\xbf"  # editors on Windows begin UTF-8 files with it
_LINE_BYTES_MAX = 256 << 20
# 4 KiB that zstd has compressed hold at most 128 MiB of text, so a hostile file cannot fill the memory.
_PACKED_BYTES = 4 << 10
_PLAIN_BYTES = 1 << 20

_PROMPTS = ("token_ids", "prompt_token_ids", "tokens")
# The prompt's text comes before, in one line; it may look like anything.
_VLLM = re.compile(
    rb"Request \S+ details: prompt: .*, prompt_token_ids: (\[[0-9, ]*\]), prompt_embeds shape: [^']*\.\s*$"
)
_SGLANG = re.compile(rb"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] (\{.*\})\s*$")
_COLUMN = re.compile(r"[A-Za-z_][\w .()/#%-]*")


class Request(NamedTuple):
    """Request of one line: the names of its blocks, or its prompt.

    `line`: number of the line, from 1. `names`: names of the blocks, all whole numbers or all texts; None if the line
    holds a prompt. `prompt`: token ids, not yet checked. `length`: tokens of the prompt, if the line with the names has
    this number.
    """

    line: int
    names: list[int] | list[str] | None
    prompt: list[Any]
    length: int | None


def read_lines(path: Path, label_hash_ids: str, label_input_length: str) -> Iterator[Request]:
    """Read the requests of a file one after the other; memory holds one line at a time.

    `path`: a file of JSON lines, or an engine's log. `label_hash_ids`, `label_input_length`: names of the fields with
    the names of a prompt's blocks and with its length.
    """
    found_any = False
    try:
        with path.open("rb") as file:
            texts = enumerate(_texts(file, path), 1)
            for number, text in texts:
                if not text.strip():
                    continue
                where = f"line {number} of {path}"
                try:
                    found = msgspec.json.decode(text)
                except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                    if found_any:
                        raise ConfigError(f"{where} is not JSON: {error}") from error
                    yield from _log_lines(path, itertools.chain([(number, text)], texts), str(error), label_hash_ids)
                    return
                found_any = True
                yield _request(number, found, where, label_hash_ids, label_input_length)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if not found_any:
        raise ConfigError(f"{path} is empty: it holds no requests")


def _request(number: int, found: Any, where: str, label_hash_ids: str, label_input_length: str) -> Request:
    """Check one line's value and make a request of it."""
    if isinstance(found, list):
        if found and isinstance(found[0], dict | list):
            raise ConfigError(
                f"{where} is a list of requests, expected one request a line: write them with jq -c '.[]' FILE"
            )
        return Request(number, None, found, None)
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {reprlib.repr(found)}, expected {_expected(label_hash_ids)}")
    if found.get(label_hash_ids) is not None:
        length = found.get(label_input_length)
        if length is not None and (type(length) is not int or length < 0):
            raise ConfigError(
                f"{where}: {label_input_length} is {reprlib.repr(length)}, expected a whole number of tokens"
            )
        return Request(number, _names(found[label_hash_ids], f"{where}: {label_hash_ids}"), [], length)
    prompts = {name: found[name] for name in _PROMPTS if found.get(name) is not None}
    for prompt in prompts.values():
        if isinstance(prompt, list):
            return Request(number, None, prompt, None)
    for name, value in prompts.items():
        raise ConfigError(f"{where}: {name} is {reprlib.repr(value)}, expected a list of token ids")
    raise ConfigError(
        f"{where} has neither {label_hash_ids} nor token ids; its fields are {', '.join(map(repr, found)) or 'none'}. "
        f"Nothing in it says which prompts begin alike; expected {_expected(label_hash_ids)}"
    )


def _names(value: Any, where: str) -> list[int] | list[str]:
    """Check the names of a prompt's blocks."""
    if not isinstance(value, list):
        raise ConfigError(f"{where} is {reprlib.repr(value)}, expected a list with a name for each block")
    for at, name in enumerate(value):
        # True is a whole number to Python, and equal to 1; 1.0 is equal to 1 as well.
        if type(name) not in (int, str) or type(name) is not type(value[0]):
            raise ConfigError(
                f"{where}: entry {at} is {reprlib.repr(name)}, expected names of blocks that are all whole numbers or "
                "all texts"
            )
    return value


def _expected(label_hash_ids: str) -> str:
    return f"an object with {label_hash_ids!r} or one of {', '.join(map(repr, _PROMPTS))}, or a list of token ids"


def _log_lines(path: Path, texts: Iterable[tuple[int, bytes]], reason: str, label_hash_ids: str) -> Iterator[Request]:
    """Yield the prompts in the log of an engine."""
    any_prompt = False
    head: list[tuple[int, bytes]] = []
    for number, text in texts:
        if len(head) < 2 and text.strip():
            head.append((number, text))
        where = f"line {number} of {path}"
        prompts: list[Any] = []
        if match := _VLLM.search(text):
            prompts = [_logged(match[1], where)]
        elif match := _SGLANG.match(text):
            prompts = _sglang_prompts(_logged(match[1], where))
        for prompt in prompts:
            if not isinstance(prompt, list):
                raise ConfigError(f"{where}: a prompt is {reprlib.repr(prompt)}, expected a list of token ids")
            if "..." in prompt:
                raise ConfigError(f"{where} lacks some token ids; start SGLang with --log-requests-level 3")
            any_prompt = True
            yield Request(number, None, prompt, None)
    if not any_prompt:
        raise ConfigError(_why_unreadable(path, head, reason, label_hash_ids))


def _logged(text: bytes, where: str) -> Any:
    """Decode the part of a log's line that is JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} looks like an entry of an engine's log and is not JSON: {error}") from error


def _sglang_prompts(entry: dict[str, Any]) -> list[Any]:
    """Return the prompts of one entry of SGLang's log."""
    received = entry.get("obj") if entry.get("event") == "request.received" else None
    ids = received.get("input_ids") if isinstance(received, dict) else None
    if not ids or not isinstance(ids, list):
        return []
    return ids if isinstance(ids[0], list) else [ids]


def _why_unreadable(path: Path, head: list[tuple[int, bytes]], reason: str, label_hash_ids: str) -> str:
    """Compose the message for a file that is neither JSON lines nor a log with prompts, from its first lines."""
    needed = f"needed are JSON lines, each {_expected(label_hash_ids)}"
    [(number, first), *_] = head
    if b"\0" in first:
        return f"{path} holds binary data; {needed}"
    if first.strip() in (b"[", b"{"):
        return f"{path} is one JSON document over several lines; {needed}: write them with jq -c '.[]' FILE"
    columns = _columns([text.decode(errors="replace") for _, text in head])
    if columns:
        named = f"{path} is a table (CSV) with the columns {', '.join(columns)}"
        if {label_hash_ids, *_PROMPTS} & set(columns):
            return f"{named}, and tables are not read; {needed}"
        return (
            f"{named}. It has the lengths of prompts and does not tell which of them begin alike, so no hit rate "
            f"follows from it; {needed}"
        )
    return (
        f"line {number} of {path} is not JSON: {reason}; there is no line of vLLM's or SGLang's log with the token ids "
        f"of a prompt either; {needed}"
    )


def _columns(lines: list[str]) -> list[str]:
    """Return the columns that the header of a CSV file names; empty if the lines are not the beginning of one."""
    for delimiter in ",;\t":
        try:
            header, *rows = csv.reader(lines, delimiter=delimiter)
        except csv.Error:
            continue
        names = [name.strip() for name in header]
        alike = all(len(row) == len(names) for row in rows)
        if len(names) > 1 and alike and all(_COLUMN.fullmatch(name) for name in names):
            return names
    return []


def _texts(file: BufferedReader, path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without their ends."""
    pieces: list[bytes] = []
    nbytes = 0
    first = True
    for chunk in _unpacked(file, path):
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            text = b"".join([*pieces, chunk[start:end]])
            yield text.removeprefix(_MARK) if first else text
            first = False
            pieces, nbytes, start = [], 0, end + 1
        pieces.append(chunk[start:])
        nbytes += len(pieces[-1])
        if nbytes > _LINE_BYTES_MAX:
            raise ConfigError(f"{path} has a line of more than {_LINE_BYTES_MAX:,} bytes; expected one request a line")
    text = b"".join(pieces)
    yield text.removeprefix(_MARK) if first else text


def _unpacked(file: BufferedReader, path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed if gzip or zstd has compressed it."""
    start = file.peek(len(ZSTD_MAGIC))
    if start.startswith(GZIP_MAGIC):
        yield from _members(file, path, lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), zlib.error)
    elif start.startswith(ZSTD_MAGIC):
        try:
            import zstandard
        except ModuleNotFoundError as error:
            raise ConfigError(f"{path} is compressed by zstd; pip install zstandard, or run 'zstd -d' first") from error
        new = zstandard.ZstdDecompressor().decompressobj
        yield from _members(file, path, new, zstandard.ZstdError)
    else:
        while data := file.read(_PLAIN_BYTES):
            yield data


def _members(file: BufferedReader, path: Path, new: Callable[[], Any], damage: type[Exception]) -> Iterator[bytes]:
    """Decompress a file whose compressed parts follow each other."""
    unpacker: Any = None  # decompresses one gzip member or one zstd frame
    while data := file.read(_PACKED_BYTES):
        while data:
            if unpacker is None:
                data = data.lstrip(b"\0")  # tapes and block devices fill the end with zeros
                if not data:
                    break
                unpacker = new()
            try:
                yield unpacker.decompress(data)
            except damage as error:
                raise ConfigError(f"{path} is compressed and damaged: {error}") from error
            data = unpacker.unused_data if unpacker.eof else b""
            if unpacker.eof:
                unpacker = None
    if unpacker is not None:
        raise ConfigError(f"{path} is compressed, and its end is missing; copy the whole file")
