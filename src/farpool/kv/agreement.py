"""Ranks of one engine exchange the results of a lookup or a load, so that all of them use the same blocks.

Rank 0 decides if a prefix is loaded, and each rank reports up to which block it could load. All ranks load up to the
last block that every one of them can load. After a load, no rank uses a block that another rank did not get.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from farpool.kv.ranks import Exchange, Ranks

__all__ = ["Agreement", "Offer"]

_LOG = logging.getLogger("farpool.kv")

_NO_LIMIT = (1 << 62) - 1
"""Number that a rank gives if it sets no limit."""
_CHAIN = slice(4, 52)
"""Bytes of a block's key that are equal on all ranks: its namespace, and the hash of all tokens up to its end."""
_PER_SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class Offer:
    """The result of one rank's lookup of a sequence.

    Attributes
    ----------
    blocks : int
        Blocks of the sequence that were looked up.
    usable : int
        Number of leading blocks that this rank would load.
    compute : int
        Number of leading blocks that the engine computes during the load.
    ends : sequence of int
        For models whose layers do not all need all blocks: 1 for each block after which this rank could continue, 0 for
        the other blocks. Empty if it could continue after every block up to `usable`.
    last : bytes
        Key of the last of `blocks`; empty if there are none.
    """

    blocks: int
    usable: int
    compute: int
    ends: Sequence[int]
    last: bytes


class Agreement:
    """Exchanges results between one cache and the caches of the other ranks.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    has_ends : bool
        The model has layers that do not need all blocks (see `Offer.ends`).

    Attributes
    ----------
    begin : callable
        `Ranks.begin`.
    """

    def __init__(self, ranks: Ranks, *, has_ends: bool) -> None:
        self.begin = ranks.begin
        self._leads = ranks.rank == 0
        self._has_ends = has_ends

    def found(self, exchange: Exchange, offers: Sequence[Offer]) -> list[tuple[int, int]]:
        """Agree on the blocks to load.

        Returns
        -------
        list of tuple of int
            For each sequence, the number of blocks that all ranks use, and the number of leading blocks among them that
            all ranks compute; both 0 if nothing is loaded.
        """
        name = _name(b"found", [offer.last for offer in offers], [offer.blocks for offer in offers])
        values = list(name)
        for offer in offers:
            values.append(offer.compute if self._leads else _NO_LIMIT)
            if self._has_ends:
                values += offer.ends or [0] * offer.blocks
            else:
                values.append(offer.usable)
        has_any = any(offer.usable for offer in offers)
        least = iter(self._least(exchange, name, values, has_any)[len(name) :])
        agreed = []
        for offer in offers:
            compute = next(least)
            if self._has_ends:
                ends = [next(least) for _ in range(offer.blocks)]
                usable = max((number for number, is_end in enumerate(ends, 1) if is_end), default=0)
            else:
                usable = next(least)
            agreed.append((usable, compute) if compute < usable else (0, 0))
        return agreed

    def loaded(
        self, exchange: Exchange, keys: Sequence[bytes], usable: Sequence[int], seconds: float
    ) -> tuple[list[int], float]:
        """Agree on the tokens that can be used after a load.

        Parameters
        ----------
        exchange : callable
            The exchange, from `begin`.
        keys : sequence of bytes
            For each sequence, key of the last block of the load.
        usable : sequence of int
            For each sequence, tokens that this rank can use.
        seconds : float
            Duration of this rank's load.

        Returns
        -------
        tuple of list of int and float
            Tokens that all ranks can use, and the duration of the slowest rank's load; 0 if it is not known.
        """
        name = _name(b"loaded", keys, [len(keys)])
        values = [*name, max(0, _NO_LIMIT - int(seconds * _PER_SECOND)), *usable]
        _, _, left, *tokens = self._least(exchange, name, values, any(usable))
        return tokens, (_NO_LIMIT - left) / _PER_SECOND if left else 0.0

    def _least(self, exchange: Exchange, name: tuple[int, int], values: Sequence[int], has_any: bool) -> Sequence[int]:
        """Return the minimum of all ranks' numbers, or zeros unless all ranks called with the same tokens."""
        nothing = [0] * len(values)
        # A rank that found nothing gives only zeros, because then it need not wait for the others.
        least = exchange(values if has_any else nothing)
        if tuple(least[:2]) == name:
            return least
        if least[0]:
            _LOG.warning(
                "ranks of one engine asked about different tokens, so none of them loads: call all ranks alike"
            )
        return nothing


def _name(step: bytes, keys: Sequence[bytes], numbers: Sequence[int]) -> tuple[int, int]:
    """Hash the subject of an exchange to two numbers, whose minima over all ranks show if all subjects are equal."""
    data = b"".join([step, *(key[_CHAIN] for key in keys), *(b"%d," % number for number in numbers)])
    name = int.from_bytes(hashlib.sha256(data).digest()[:7], "big") | 1
    return name, _NO_LIMIT - name
