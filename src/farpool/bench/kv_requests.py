"""Requests to a serving engine, as names of the blocks of their prompts: read from a log, or generated from a seed.

Read are JSON lines. Objects with ``hash_ids``, ``input_length``, ``output_length`` and ``timestamp`` are Mooncake's
traces and vLLM's timed traces; only ``hash_ids`` is needed. Objects with ``token_ids``, ``prompt_token_ids`` or
``tokens``, and plain lists of numbers, are prompts, which are cut into full blocks; the name of a block then
depends on all tokens up to its end. Read are also the engines' own logs where they have the token ids of prompts:
vLLM's (``--enable-log-requests`` at level DEBUG) and SGLang's (``--log-requests --log-requests-level 3
--log-requests-format json``); their other lines are passed over.

A block with the same name behind another block is another block. Some timed traces name a block by its own tokens
only.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from farpool.errors import ConfigError
from farpool.kv.keys import token_chain

__all__ = ["Requests", "generate", "read"]

_PROMPTS = ("token_ids", "prompt_token_ids", "tokens")
_Line = tuple[int, list[Any], Any, int | None]
"""Number of a line, with its hashes, or its prompt, and the length of the prompt."""
# The prompt's text comes before, in one line; it may look like anything.
_VLLM = re.compile(
    rb"Request \S+ details: prompt: .*, prompt_token_ids: (\[[0-9, ]*\]), prompt_embeds shape: [^']*\.\s*$"
)
_SGLANG = re.compile(rb"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] (\{.*\})\s*$")


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in the order of their arrival.

    Attributes
    ----------
    name : str
        Name of the file, or how they were generated.
    block_tokens : int
        Tokens of a block.
    chains : list of list of int
        Blocks of each prompt, first to last. The same number is the same block after the same blocks.
    tokens : list of int
        Length of each prompt; the last block may be partly filled.
    folded : int
        Names in the file that stand behind different blocks, and so for several.
    """

    name: str
    block_tokens: int
    chains: list[list[int]]
    tokens: list[int]
    folded: int = 0

    @property
    def blocks(self) -> int:
        """Number of all blocks, each as often as it occurs."""
        return sum(map(len, self.chains))

    @property
    def distinct(self) -> int:
        """Number of different blocks."""
        return len({block for chain in self.chains for block in chain})

    def first(self, count: int) -> Requests:
        """Return the first requests only."""
        return replace(self, chains=self.chains[:count], tokens=self.tokens[:count])


def read(
    path: Path,
    block_tokens: int | None = None,
    label_hash_ids: str = "hash_ids",
    label_input_length: str = "input_length",
) -> Requests:
    """Read a log of requests.

    Parameters
    ----------
    path : Path
        A file of JSON lines, or an engine's log.
    block_tokens : int, optional
        Tokens of a block. None finds them from the lengths where there are any, and takes 16 for prompts.
    label_hash_ids, label_input_length : str
        Names of the fields with the blocks of a prompt and with its length.

    Raises
    ------
    ConfigError
        The file cannot be read, a line is of no form that is known, or the size of blocks is missing or contradicted.
    """
    numbers: dict[tuple[int, Any], int] = {}
    before: dict[Any, int] = {}
    folded = set()
    named = False
    chains: list[list[int]] = []
    tokens: list[int | None] = []
    page = block_tokens or 16
    for line, hashes, prompt, length in _lines(path, label_hash_ids, label_input_length):
        if prompt is not None:
            if not all(type(token) is int and 0 <= token < 1 << 64 for token in prompt):
                raise ConfigError(f"line {line} of {path} holds no token ids; expected whole numbers below 2**64")
            hashes = token_chain(prompt, page)
            length = len(prompt)
        else:
            named = True
        chain: list[int] = []
        for name in hashes:
            parent = chain[-1] if chain else -1
            if before.setdefault(name, parent) != parent:
                folded.add(name)
            chain.append(numbers.setdefault((parent, name), len(numbers)))
        chains.append(chain)
        tokens.append(length)
    if not any(chains):
        raise ConfigError(f"{path} holds no requests with a full block")
    size = page
    if named:
        size = block_tokens or _found_size(path, chains, tokens)
        for line, (chain, length) in enumerate(zip(chains, tokens, strict=True), 1):
            if length is not None and len(chain) > -(-length // size):
                raise ConfigError(
                    f"request {line} of {path} has {len(chain)} blocks, too many for {length} tokens at {size} a block"
                )
    lengths = [len(chain) * size if length is None else length for chain, length in zip(chains, tokens, strict=True)]
    return Requests(path.name, size, chains, lengths, len(folded))


def generate(requests: int, seed: int = 1) -> Requests:
    """Generate conversations over a few system prompts; each turn's prompt begins with the conversation so far."""
    dice = random.Random(seed)
    fresh = iter(range(1 << 40))
    systems = [[next(fresh) for _ in range(4)] for _ in range(3)]
    open_ones: list[list[int]] = []
    chains = []
    for _ in range(requests):
        if open_ones and dice.random() < 0.6:
            chain = open_ones[int(len(open_ones) * dice.random() ** 3)]
        else:
            chain = list(systems[int(3 * dice.random())])
            open_ones.insert(0, chain)
            del open_ones[64:]
        chain.extend(next(fresh) for _ in range(1 + int(6 * dice.random())))
        chains.append(list(chain))
    return Requests("generated: conversations over 3 system prompts", 512, chains, [512 * len(one) for one in chains])


def _lines(path: Path, label_hash_ids: str, label_input_length: str) -> Iterator[_Line]:
    """Requests in a file of JSON lines, or in a log."""
    try:
        with path.open("rb") as file:
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    found = msgspec.json.decode(text)
                except msgspec.DecodeError as error:
                    if line == 1:
                        file.seek(0)
                        yield from _log_lines(path, file, str(error))
                        return
                    raise ConfigError(f"line {line} of {path} is not JSON: {error}") from error
                if isinstance(found, list):
                    yield line, [], found, None
                    continue
                fields = found if isinstance(found, dict) else {}
                prompt = next((fields[name] for name in _PROMPTS if isinstance(fields.get(name), list)), None)
                hashes, length = fields.get(label_hash_ids), fields.get(label_input_length)
                if isinstance(hashes, list) and all(isinstance(one, int) for one in hashes):
                    yield line, hashes, None, length if isinstance(length, int) else None
                elif prompt is not None:
                    yield line, [], prompt, None
                else:
                    raise ConfigError(
                        f"line {line} of {path} has neither {label_hash_ids} nor token ids; expected an object with "
                        f"{label_hash_ids!r} or one of {', '.join(map(repr, _PROMPTS))}, or a list of token ids"
                    )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _log_lines(path: Path, file: Iterable[bytes], reason: str) -> Iterator[_Line]:
    """Prompts in the log of an engine, with the numbers of their lines."""
    any_prompt = False
    for line, text in enumerate(file, 1):
        prompts: list[Any] = []
        if match := _VLLM.search(text):
            prompts = [msgspec.json.decode(match[1])]
        elif match := _SGLANG.match(text):
            entry = msgspec.json.decode(match[1])
            ids = entry.get("obj", {}).get("input_ids") if entry.get("event") == "request.received" else None
            if ids and isinstance(ids, list):
                prompts = ids if isinstance(ids[0], list) else [ids]
        for prompt in prompts:
            if "..." in prompt:
                raise ConfigError(f"line {line} of {path} has not all token ids; pass --log-requests-level 3")
            any_prompt = True
            yield line, [], prompt, None
    if not any_prompt:
        raise ConfigError(
            f"line 1 of {path} is not JSON: {reason}; there is no line of vLLM's or SGLang's log with the token ids of "
            "a prompt either"
        )


def _found_size(path: Path, chains: list[list[int]], tokens: list[int | None]) -> int:
    """Find the one power of two that fits the lengths of all prompts."""
    pairs = [(len(chain), length) for chain, length in zip(chains, tokens, strict=True) if length is not None]
    sizes = [1 << shift for shift in range(13)]
    fitting = [size for size in sizes if pairs and all(count == -(-length // size) for count, length in pairs)]
    if len(fitting) != 1:
        raise ConfigError(
            f"the lengths in {path} do not say how many tokens a block has; pass --block-tokens, such as 512"
        )
    return fitting[0]
