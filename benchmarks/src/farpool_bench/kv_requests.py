"""Requests to a serving engine, as names of the blocks of their prompts: read from a file, or generated from a seed.

`kv_request_lines` reads the files. A prompt is cut into full blocks; the name of a block then depends on all tokens up
to its end.

A block with the same name behind another block is another block. Some timed traces name a block by its own tokens
only.
"""

from __future__ import annotations

import random
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farpool.errors import ConfigError
from farpool.kv.keys import token_chain
from farpool_bench.kv_request_lines import read_lines

_PROMPT = "a prompt"
_NUMBERS = "names of blocks that are whole numbers"


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in the order of their arrival.

    `name`: name of the file, or how they were generated. `block_tokens`: tokens of a block. `chains`: blocks of each
    prompt, first to last. The same number is the same block after the same blocks. `tokens`: length of each prompt; the
    last block may be partly filled. `folded`: names in the file that stand behind different blocks, and so for several.
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
    path: Path, block_tokens: int | None = None, label_ids: str = "hash_ids", label_length: str = "input_length"
) -> Requests:
    """Read a log of requests.

    `path`: a file of JSON lines or an engine's log, which gzip or zstd may have compressed. `block_tokens`: tokens of a
    block. None finds them from the lengths where there are any, and takes 16 for prompts. `label_ids`,
    `label_length`: names of the fields with the blocks of a prompt and with its length.
    """
    numbers: dict[tuple[int, Any], int] = {}
    before: dict[Any, int] = {}
    folded = set()
    form = ""
    chains: list[list[int]] = []
    tokens: list[int | None] = []
    blocks: Sequence[Any]
    page = block_tokens or 16
    for line, names, prompt, length in read_lines(path, label_ids, label_length):
        found, blocks = _form(names), names or ()
        if names is None:
            _check_tokens(prompt, f"line {line} of {path}")
            blocks, length = token_chain(prompt, page), len(prompt)
        # A name that is a number equals no name that is a text, so two forms in one file would share nothing.
        if form and found and found != form:
            raise ConfigError(
                f"line {line} of {path} holds {found}, and lines before it hold {form}; expected one form"
            )
        form = form or found
        chain: list[int] = []
        for name in blocks:
            parent = chain[-1] if chain else -1
            if before.setdefault(name, parent) != parent:
                folded.add(name)
            chain.append(numbers.setdefault((parent, name), len(numbers)))
        chains.append(chain)
        tokens.append(length)
    if not any(chains):
        raise ConfigError(f"{path} holds no requests with a full block")
    size = page
    if form != _PROMPT:
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


def _form(names: list[int] | list[str] | None) -> str:
    """Return the form of a request in words; empty if it has no blocks, which suits every form."""
    if names is None:
        return _PROMPT
    return "" if not names else "names of blocks that are texts" if isinstance(names[0], str) else _NUMBERS


def _check_tokens(prompt: list[Any], where: str) -> None:
    for at, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token < 1 << 64:
            raise ConfigError(
                f"{where} holds no token ids: entry {at} is {reprlib.repr(token)}, expected whole numbers below 2**64"
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
