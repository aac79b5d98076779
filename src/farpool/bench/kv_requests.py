"""Requests to a serving engine, as names of the blocks of their prompts: read from a log, or generated from a seed.

Read are JSON lines. Objects with ``hash_ids``, ``input_length``, ``output_length`` and ``timestamp`` are Mooncake's
traces and vLLM's timed traces; only ``hash_ids`` is needed. Objects with ``token_ids``, ``prompt_token_ids`` or
``tokens``, and plain lists of numbers, are prompts, which are cut into full blocks; the name of a block then
depends on all tokens up to its end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from farpool.errors import ConfigError
from farpool.kv.keys import token_chain

__all__ = ["Requests", "generate", "read"]

_PROMPTS = ("token_ids", "prompt_token_ids", "tokens")


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
    """

    name: str
    block_tokens: int
    chains: list[list[int]]
    tokens: list[int]

    @property
    def blocks(self) -> int:
        """Number of all blocks, each as often as it occurs."""
        return sum(map(len, self.chains))

    @property
    def distinct(self) -> int:
        """Number of different blocks."""
        return len({block for chain in self.chains for block in chain})


def read(path: Path, block_tokens: int | None = None) -> Requests:
    """Read a log of requests.

    Parameters
    ----------
    path : Path
        A file of JSON lines.
    block_tokens : int, optional
        Tokens of a block. None finds them from the lengths where there are any, and takes 16 for prompts.

    Raises
    ------
    ConfigError
        The file cannot be read, a line is of no form that is known, or the size of blocks is missing or contradicted.
    """
    numbers: dict[Any, int] = {}
    before: dict[int, int] = {}
    chains: list[list[int]] = []
    tokens: list[int | None] = []
    page = block_tokens or 16
    for line, hashes, prompt, length in _lines(path):
        if prompt is not None:
            if not all(type(token) is int and 0 <= token < 1 << 64 for token in prompt):
                raise ConfigError(f"line {line} of {path} holds no token ids; expected whole numbers below 2**64")
            hashes = token_chain(prompt, page)
            length = len(prompt)
        chain = [numbers.setdefault(one, len(numbers)) for one in hashes]
        for parent, block in zip([-1, *chain], chain, strict=False):
            if before.setdefault(block, parent) != parent:
                raise ConfigError(
                    f"line {line} of {path} has block {hashes[chain.index(block)]!r} after another block than before; "
                    "a block's name must stand for all tokens up to its end"
                )
        chains.append(chain)
        tokens.append(length)
    if not any(chains):
        raise ConfigError(f"{path} holds no requests with a full block")
    size = page
    if any(isinstance(one, int) for one in numbers):
        size = block_tokens or _found_size(path, chains, tokens)
        for line, (chain, length) in enumerate(zip(chains, tokens, strict=True), 1):
            if length is not None and len(chain) > -(-length // size):
                raise ConfigError(
                    f"request {line} of {path} has {len(chain)} blocks, too many for {length} tokens at {size} a block"
                )
    lengths = [len(chain) * size if length is None else length for chain, length in zip(chains, tokens, strict=True)]
    return Requests(path.name, size, chains, lengths)


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


def _lines(path: Path) -> Iterator[tuple[int, list[Any], Any, int | None]]:
    """Number of each line, with its hashes, or its prompt, and the length of the prompt."""
    try:
        with path.open("rb") as file:
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    found = msgspec.json.decode(text)
                except msgspec.DecodeError as error:
                    raise ConfigError(f"line {line} of {path} is not JSON: {error}") from error
                if isinstance(found, list):
                    yield line, [], found, None
                    continue
                fields = found if isinstance(found, dict) else {}
                prompt = next((fields[name] for name in _PROMPTS if isinstance(fields.get(name), list)), None)
                hashes, length = fields.get("hash_ids"), fields.get("input_length")
                if isinstance(hashes, list) and all(isinstance(one, int) for one in hashes):
                    yield line, hashes, None, length if isinstance(length, int) else None
                elif prompt is not None:
                    yield line, [], prompt, None
                else:
                    raise ConfigError(
                        f"line {line} of {path} has neither hash_ids nor token ids; expected an object with "
                        f"'hash_ids' or one of {', '.join(map(repr, _PROMPTS))}, or a list of token ids"
                    )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


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
