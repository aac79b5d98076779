"""Striping: one tier over several inner tiers, which work at the same time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from farpool._native import StripedPort
from farpool.abc.tier import Extent, Tier, TierInfo
from farpool.errors import ConfigError, TierFullError
from farpool.memory.tiers.space import ExtentSpace
from farpool.memory.tiers.wrapper import WrapperTier
from farpool.sizes import parse_size

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["STRIPE", "Striped"]

STRIPE = 1 << 20
"""Default size of a stripe in bytes."""


class Striped(WrapperTier):
    """Wrapper that spreads bytes over several tiers in stripes, so that a transfer uses all of them at the same time.

    Each inner tier holds the same number of whole stripes: as many as fit into the smallest inner tier. Losing one tier
    loses all bytes. Any tiers can be striped, because the wrapper reserves a separate extent in an inner tier for each
    piece of an extent. The wrapper works natively, without the interpreter lock, if the inner tiers do.

    Parameters
    ----------
    tiers : iterable of Tier
        The inner tiers; opened and closed with this one. Errors name them by number, so their names may be equal.
    stripe : int or str
        Bytes of a stripe, or a size such as ``"1MiB"``; a multiple of the inner tiers' alignments.
    name : str, optional
        Name of the tier; the name of the first inner tier unless given.

    Raises
    ------
    ConfigError
        There is no tier, a tier is given twice, a tier is smaller than a stripe, or the stripe is not a multiple of a
        tier's alignment.
    """

    def __init__(self, tiers: Iterable[Tier], stripe: int | str = STRIPE, name: str | None = None) -> None:
        super().__init__(*tiers)
        if not self._inners:
            raise ConfigError(
                "tiers are missing, expected one or more, for example [Nvme(...), Nvme(...)]", setting="tiers"
            )
        if len({id(tier) for tier in self._inners}) < len(self._inners):
            raise ConfigError("tiers has one tier twice, expected each tier once", setting="tiers")
        self._name = name
        self._stripe = parse_size(stripe, "stripe")
        self._known: TierInfo | None = None
        self._space: ExtentSpace | None = None
        self._striped: StripedPort | None = None
        self._pieces: dict[int, list[tuple[Tier, Extent]]] = {}
        """For each extent, by its offset, the extents in the inner tiers that hold its pieces."""

    @property
    def stripe(self) -> int:
        """Bytes of a stripe."""
        return self._stripe

    @property
    def info(self) -> TierInfo:
        with self._lifecycle:
            if self._known is None:
                self._known = self._described([tier.info for tier in self._inners])
            return self._known

    @property
    def reserved(self) -> int:
        space = self._space
        return 0 if space is None else space.reserved

    def reserve(self, nbytes: int) -> Extent:
        with self._lifecycle:
            self.port  # noqa: B018 - raises if the tier is closed
            assert self._space is not None
            assert self._striped is not None
            extent = self._space.reserve(nbytes)
            pieces: list[tuple[Tier, Extent]] = []
            try:
                for number, size in self._cut(extent):
                    pieces.append((self._inners[number], self._reserve_piece(number, size)))
            except BaseException:
                for tier, piece in pieces:
                    tier.free(piece)
                self._space.free(extent)
                raise
            self._pieces[extent.offset] = pieces
            self._striped.place(extent.offset, [piece.offset for _, piece in pieces])
            return extent

    def free(self, extent: Extent) -> None:
        with self._lifecycle:
            self._check_extent(extent)
            assert self._space is not None
            assert self._striped is not None
            for tier, piece in self._pieces.pop(extent.offset):
                tier.free(piece)
            self._striped.forget(extent.offset)
            self._space.free(extent)

    def _wrap(self, *ports: Port) -> Port:
        # A tier may know its capacity only when it is open, so an earlier description may be outdated.
        info = self._known = self._described([tier.info for tier in self._inners])
        share = info.capacity // len(ports)
        self._space = ExtentSpace(info.name, info.capacity, info.alignment)
        self._striped = StripedPort(info.name, ports, stripe=self._stripe, share=share, placed=True)
        return self._striped

    def _close_port(self) -> None:
        self._space = self._striped = None
        self._pieces.clear()
        super()._close_port()

    def _check_extent(self, extent: Extent) -> None:
        if self._space is None:
            raise ValueError(f"{self.info.name}: no extent is reserved, because the tier is not open")
        self._space.require(extent)

    def _cut(self, extent: Extent) -> Iterator[tuple[int, int]]:
        """Cut an extent at the ends of stripes. Yield, for each piece, the index of its inner tier and its bytes."""
        done = 0
        while done < extent.nbytes:
            stripe, inside = divmod(extent.offset + done, self._stripe)
            size = min(extent.nbytes - done, self._stripe - inside)
            yield stripe % len(self._inners), size
            done += size

    def _reserve_piece(self, number: int, nbytes: int) -> Extent:
        try:
            return self._inners[number].reserve(nbytes)
        except TierFullError as error:
            name = self.info.name
            raise TierFullError(
                f"{name}: inner tier {number + 1} of {len(self._inners)} has no room: {error}", tier=name
            ) from error

    def _described(self, inner: list[TierInfo]) -> TierInfo:
        alignment = math.lcm(*(info.alignment for info in inner))
        if self._stripe < 1 or self._stripe % alignment:
            raise ConfigError(
                f"stripe is {self._stripe} bytes, expected a multiple of {alignment}, the alignment of the inner tiers",
                setting="stripe",
            )
        smallest = min(info.capacity for info in inner)
        if smallest < self._stripe:
            raise ConfigError(
                f"stripe is {self._stripe} bytes, but the smallest inner tier has {smallest}; give a smaller stripe",
                setting="stripe",
            )
        latencies = [info.latency for info in inner if info.latency is not None]
        return replace(
            inner[0],
            name=inner[0].name if self._name is None else self._name,
            capacity=(smallest - smallest % self._stripe) * len(inner),
            alignment=alignment,
            latency=max(latencies, default=None),
            read_bandwidth=_together([info.read_bandwidth for info in inner]),
            write_bandwidth=_together([info.write_bandwidth for info in inner]),
        )


def _together(rates: list[float | None]) -> float | None:
    """Return the bytes per second of all inner tiers together; None if a rate is unknown.

    The slowest tier limits the others, because all tiers move the same number of bytes.
    """
    known = [rate for rate in rates if rate is not None]
    return min(known) * len(rates) if len(known) == len(rates) else None
