"""A cache as one of the ranks of an engine: all ranks use the same blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from farpool.errors import ConfigError
from farpool.kv.agreement import Agreement, Offer
from farpool.kv.judge import Judge
from farpool.kv.plan import Match, Shape
from farpool.kv.reasons import Reason

if TYPE_CHECKING:
    from farpool.kv.ranks import Exchange, Ranks

__all__ = ["Peers", "count_of_ranks"]


class Peers:
    """The other ranks, and the results on which this rank agrees with them. Thread-safe.

    Parameters
    ----------
    ranks : Ranks or None
        Object through which the ranks agree; None if this rank uses its blocks without asking others.
    shape : Shape
        Layers of this rank.
    judge : Judge
        Judge of this rank.
    missed : callable
        Records blocks that this rank has and does not use (`BlockCache.missed`).
    decides : bool
        This rank decides whether a prefix is loaded.

    Attributes
    ----------
    needs_ends : bool
        True if the ranks agree about every block after which a rank could continue (see `Offer.ends`).
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
        self._agreement = None if ranks is None else Agreement(ranks, has_ends=not shape.is_uniform)
        self.needs_ends = ranks is not None and not shape.is_uniform
        self._step = shape.block
        self._judge = judge
        self._missed = missed
        self._decides = decides

    def begin(self) -> Exchange | None:
        """Begin an exchange with the other ranks, in the order of calls; None if there are no ranks to agree with."""
        return None if self._agreement is None else self._agreement.begin()

    def begin_load(self, matches: Sequence[Match]) -> Exchange | None:
        """Begin the exchange of a load; None if the ranks have agreed that there is nothing to load.

        A rank whose lookup raised an error has no match to load, so the others must not begin an exchange without it.
        """
        return self.begin() if any(match.tokens for match in matches) else None

    def abandon(self, exchange: Exchange | None) -> None:
        """Take part in the exchange of a lookup that failed here, with nothing, because the other ranks wait for it."""
        self.agree([], exchange)

    def agree(self, matches: list[Match], exchange: Exchange | None) -> list[Match]:
        """Reduce this rank's matches to the blocks that all ranks load."""
        if exchange is None or self._agreement is None:
            return matches
        step = self._step
        offers = [
            Offer(
                match.wanted.blocks,
                match.tokens // step,
                match.compute // step,
                match.ends if match.tokens else (),
                match.wanted.last,
            )
            for match in matches
        ]
        agreed = self._agreement.found(exchange, offers)
        return [
            self._reduced(match, usable * step, compute * step)
            for match, (usable, compute) in zip(matches, agreed, strict=True)
        ]

    def _reduced(self, match: Match, tokens: int, compute: int) -> Match:
        """Return a match with the tokens on which all ranks have agreed."""
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
        """Agree on the loaded tokens.

        Parameters
        ----------
        matches : sequence of Match
            Matches that were loaded.
        usable : list of int
            For each the tokens that this rank can use.
        seconds : float
            Time that this rank's load took; 0 if it is not known.
        exchange : callable or None
            The exchange, from `begin_load`.

        Returns
        -------
        tuple of list of int and float
            For each match the tokens that all ranks can use, and the time of the slowest rank; 0 if it is not known.
        """
        if exchange is None or self._agreement is None:
            return usable, seconds
        lasts = [match.wanted.last for match in matches]
        agreed, slowest = self._agreement.loaded(exchange, lasts, usable, seconds)
        for match, own, tokens in zip(matches, usable, agreed, strict=True):
            if tokens < own:
                self._unused("load", match, own - tokens)
        return agreed, max(seconds, slowest) if seconds else 0.0

    def _unused(self, step: str, match: Match, tokens: int) -> None:
        """Write into the journal that this rank could have used more tokens than all ranks together."""
        why = "another rank lacks the block, computes it, or did not answer in time"
        self._missed(step, match.request, tokens // self._step, Reason.OTHER_RANK, why)


def count_of_ranks(parallel: Mapping[str, int], rank: int, ranks: Ranks | None) -> int:
    """Return how many ranks there are.

    Raises
    ------
    ConfigError
        There is no such rank, or `ranks` contradicts `parallel` and `rank`.
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
