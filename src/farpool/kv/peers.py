"""Lets one rank of an engine agree with the other ranks, so that all ranks use the same blocks.

Rank 0 decides whether a prefix is loaded, and each rank reports up to which block it could load. All ranks then load
up to the last block that every rank can load. After a load, no rank uses a block that another rank could not load.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from farpool.errors import ConfigError
from farpool.kv.judge import Judge
from farpool.kv.plan import Match, Shape
from farpool.kv.reasons import Reason

if TYPE_CHECKING:
    from farpool.kv.ranks import Exchange, Ranks

__all__ = ["Peers", "count_of_ranks"]

_LOG = logging.getLogger("farpool.kv")

_NO_LIMIT = (1 << 62) - 1
"""Number that a rank contributes to a minimum if it sets no limit."""
_CHAIN = slice(4, 52)
"""Bytes of a block's key that are equal on all ranks: its namespace, and the hash of all tokens up to its end."""
_TICKS_PER_SECOND = 1_000_000


class Peers:
    """Agrees with the other ranks about matches and loads. Thread-safe.

    Parameters
    ----------
    ranks : Ranks or None
        Object through which the ranks agree; None if this rank uses its blocks without asking others.
    shape : Shape
        Layers of this rank.
    judge : Judge
        Judge of this rank.
    missed : callable
        Records blocks that this rank has but does not use (`BlockCache.missed`).
    decides : bool
        True if this rank decides whether a prefix is loaded.

    Attributes
    ----------
    needs_ends : bool
        True if some layers do not need all blocks of a prefix. Each rank then reports every block after which it could
        continue (`Match.ends`), not only the last of them.
    """

    def __init__(
        self,
        ranks: Ranks | None,
        shape: Shape,
        judge: Judge,
        missed: Callable[[str, str, int, Reason, str], None],
        *,
        decides: bool,
    ) -> None:
        self._ranks = ranks
        self.needs_ends = ranks is not None and not shape.is_uniform
        self._step = shape.block
        self._judge = judge
        self._missed = missed
        self._decides = decides

    def begin(self) -> Exchange | None:
        """Begin an exchange with the other ranks, and return it; return None if there are no other ranks.

        All ranks must call this in the same order.
        """
        return None if self._ranks is None else self._ranks.begin()

    def begin_load(self, matches: Sequence[Match]) -> Exchange | None:
        """Begin the exchange of a load, and return it; return None if the ranks have agreed to load nothing.

        If the lookup of a rank raised an error, all ranks have agreed to load nothing, so no rank begins an exchange.
        """
        return self.begin() if any(match.tokens for match in matches) else None

    def abandon(self, exchange: Exchange | None) -> None:
        """Contribute zeros to the exchange of a failed call, so that the other ranks do not wait for this rank."""
        if exchange is not None:
            exchange([0, 0])

    def agree(self, matches: list[Match], exchange: Exchange | None) -> list[Match]:
        """Return this rank's matches, reduced to the blocks that all ranks load."""
        if exchange is None:
            return matches
        step = self._step
        name = _name(b"found", [match.wanted.last for match in matches], [match.wanted.blocks for match in matches])
        values = [*name]
        for match in matches:
            values.append(match.compute // step if self._decides else _NO_LIMIT)
            if not self.needs_ends:
                values.append(match.tokens // step)
            else:
                values += match.ends if match.tokens and match.ends else [0] * match.wanted.blocks
        least = iter(_least(exchange, name, values, any(match.tokens for match in matches)))
        agreed = []
        for match in matches:
            compute = next(least)
            if not self.needs_ends:
                usable = next(least)
            else:
                ends = [next(least) for _ in range(match.wanted.blocks)]
                usable = max((number for number, is_end in enumerate(ends, 1) if is_end), default=0)
            if compute >= usable:
                usable = compute = 0
            agreed.append(self._reduced(match, usable * step, compute * step))
        return agreed

    def _reduced(self, match: Match, tokens: int, compute: int) -> Match:
        """Return a match reduced to the numbers of tokens on which all ranks have agreed."""
        if (tokens, compute) == (match.tokens, match.compute):
            return match
        if tokens == match.tokens:
            return msgspec.structs.replace(match, compute=compute)
        self._unused("lookup", match, match.tokens - tokens)
        if not tokens and self._decides:
            self._judge.missed(match.wanted.blocks * self._step, match.seconds)
        return msgspec.structs.replace(match, tokens=tokens, compute=compute, reason=Reason.OTHER_RANK)

    def agree_load(
        self, matches: Sequence[Match], usable: list[int], seconds: float, exchange: Exchange | None
    ) -> tuple[list[int], float]:
        """Agree with the other ranks how many loaded tokens all ranks use.

        Parameters
        ----------
        matches : sequence of Match
            The loaded matches.
        usable : list of int
            For each match, the number of tokens that this rank can use.
        seconds : float
            Time that this rank's load took; 0 if it is not known.
        exchange : callable or None
            The exchange, from `begin_load`.

        Returns
        -------
        tuple of list of int and float
            For each match, the number of tokens that all ranks can use; and the seconds that the slowest rank took, or
            0 if they are not known.
        """
        if exchange is None:
            return usable, seconds
        name = _name(b"loaded", [match.wanted.last for match in matches], [len(matches)])
        values = [*name, max(0, _NO_LIMIT - int(seconds * _TICKS_PER_SECOND)), *usable]
        left, *agreed = _least(exchange, name, values, any(usable))
        for match, own, tokens in zip(matches, usable, agreed, strict=True):
            if tokens < own:
                self._unused("load", match, own - tokens)
        slowest = (_NO_LIMIT - left) / _TICKS_PER_SECOND if left else 0.0
        return agreed, max(seconds, slowest) if seconds else 0.0

    def _unused(self, step: str, match: Match, tokens: int) -> None:
        """Record in the journal that this rank can use `tokens` more tokens than the ranks have agreed on."""
        why = "another rank lacks the block, computes it, or did not answer in time"
        self._missed(step, match.request, tokens // self._step, Reason.OTHER_RANK, why)


def _least(exchange: Exchange, name: tuple[int, int], values: Sequence[int], has_any: bool) -> Sequence[int]:
    """Exchange numbers with all ranks, and return the minimum of each number after the name.

    Return zeros if a rank contributes only zeros, or if the ranks have different names. Different names mean that the
    ranks were called with different tokens.

    Parameters
    ----------
    exchange : callable
        The exchange.
    name : tuple of int
        Result of `_name` for the tokens of this call.
    values : sequence of int
        This rank's numbers, which begin with the name.
    has_any : bool
        False if this rank found nothing. The rank then contributes only zeros, so that it need not wait for the others.
    """
    nothing = [0] * len(values)
    least = exchange(values if has_any else nothing)
    if tuple(least[:2]) == name:
        return least[2:]
    if least[0]:
        _LOG.warning("ranks of one engine asked about different tokens, so none of them loads: call all ranks alike")
    return nothing[2:]


def _name(step: bytes, keys: Sequence[bytes], numbers: Sequence[int]) -> tuple[int, int]:
    """Return the name of an exchange: two numbers, from a hash of the step and the tokens of the exchange.

    The minimum of each of these numbers over all ranks equals the name only if all ranks have the same name.
    """
    data = b"".join([step, *(key[_CHAIN] for key in keys), *(b"%d," % number for number in numbers)])
    name = int.from_bytes(hashlib.sha256(data).digest()[:7], "big") | 1
    return name, _NO_LIMIT - name


def count_of_ranks(parallel: Mapping[str, int], rank: int, ranks: Ranks | None) -> int:
    """Return the number of ranks that `parallel` describes.

    Raises
    ------
    ConfigError
        `rank` is not the number of a rank, or `ranks` contradicts `parallel` and `rank`.
    """
    if not all(isinstance(size, int) and size > 0 for size in parallel.values()):
        raise ConfigError(f"parallel is {parallel!r}, expected sizes above 0", setting="parallel")
    count = math.prod(parallel.values())
    if not isinstance(rank, int) or not 0 <= rank < count:
        raise ConfigError(f"rank is {rank!r}, expected 0 to {count - 1}", setting="rank")
    if ranks is not None and (ranks.rank, ranks.size) != (rank, count):
        raise ConfigError(
            f"ranks is rank {ranks.rank} of {ranks.size}, expected rank {rank} of {count}, from parallel and rank",
            setting="ranks",
        )
    return count
