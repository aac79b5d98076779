"""Tracks where in the arena each block's bytes are stored, from the pager's map and its commands.

A block that has a range of the arena is a *tenant* of the range. The pager changes its map when it makes a command,
before the bytes are moved. Debug mode needs the place where the bytes are now. So it keeps a map of its own, and
updates this map when commands are about to be started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from farpool.memory.pager import Kind, Move, Pager, Transfer

__all__ = ["Left", "Tenant", "Tenants", "gaps"]


@dataclass(slots=True)
class Tenant:
    """A block that has a range of the arena.

    Attributes
    ----------
    filled : bool
        True if the range contains the block's content: the block has been fetched, or an access has written it.
    """

    block: int
    place: int
    nbytes: int
    filled: bool = False


@dataclass(slots=True)
class Left:
    """A block that lost its range of the arena.

    Attributes
    ----------
    moved : Move or None
        The last command that still moves the block's bytes; None if no command does.
    written : bool
        True if a transfer writes the block's bytes back, from the target of `moved` if there is such a move.
    free : list of (int, int)
        Parts of the range, as place and number of bytes, whose present bytes no block or command needs any more. New
        bytes may arrive there when the commands are started. Empty if `moved` is not None.
    """

    tenant: Tenant
    moved: Move | None
    written: bool
    free: list[tuple[int, int]] = field(default_factory=list)


class Tenants:
    """Map of the arena: each block in it, and the place of the block's bytes now.

    Attributes
    ----------
    generation : Counter
        For each block, how many times it has got, changed or lost its place.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._here: dict[int, Tenant] = {}
        self._leaving: dict[int, Tenant] = {}
        """Blocks that have lost their range, by the ID of the write-back that still reads the range."""
        self.generation: Counter[int] = Counter()

    def __getitem__(self, block: int) -> Tenant:
        return self._here[block]

    def __iter__(self) -> Iterator[Tenant]:
        return iter(tuple(self._here.values()))

    def get(self, block: int) -> Tenant | None:
        return self._here.get(block)

    def update(self, commands: Sequence[Transfer | Move]) -> list[Left]:
        """Update this map from the pager's map, just before the `commands` that carry out the changes are started.

        Returns
        -------
        list of Left
            The blocks that lost their ranges.
        """
        owners = self._owners()
        final, moves = self._follow_moves(commands)
        written = {c.block: c for c in commands if isinstance(c, Transfer) and c.kind == Kind.WRITE_BACK}
        left: list[Left] = []
        needed: list[tuple[int, int]] = []
        for tenant in self:
            block = tenant.block
            place = owners.get(block)
            if place is not None and place == final.get(block):
                self.generation[block] += place != tenant.place
                needed.append((tenant.place, tenant.place + tenant.nbytes))
                tenant.place = place
                continue
            del self._here[block]
            self.generation[block] += 1
            write_back = written.get(block) or self._write_back_of(block)
            if write_back is not None:
                self._leaving[write_back.id] = replace(tenant, place=write_back.pieces[0].place)
            left.append(Left(tenant, moves.get(block), write_back is not None))
        needed += self._read_by_write_backs()
        needed.sort()
        for block, place in owners.items():
            if block not in self._here:
                self._arrive(block, place)
        for item in left:
            if item.moved is None:
                item.free.extend(gaps(needed, item.tenant.place, item.tenant.place + self._rounded(item.tenant)))
        return left

    def _rounded(self, tenant: Tenant) -> int:
        return self._pager.rounded(tenant.nbytes)

    def _follow_moves(self, commands: Sequence[Transfer | Move]) -> tuple[dict[int, int], dict[int, Move]]:
        """Return the place that each block's bytes have after the commands, and the last move of each moved block."""
        places = {tenant.block: tenant.place for tenant in self}
        last: dict[int, Move] = {}
        for command in commands:
            if isinstance(command, Move):
                # Two blocks have the same place while the pager has given it to one block and the other has not left.
                here = [block for block, place in places.items() if place == command.source]
                for block in sorted(here, key=lambda block: not self._here[block].filled)[:1]:
                    self._displace(places, command, block)
                    places[block] = command.target
                    last[block] = command
        return places, last

    def _displace(self, places: dict[int, int], move: Move, moved: int) -> None:
        """Remove the blocks in a move's target range from `places`.

        Such a block has lost its range without a command. It may get another range later.
        """
        low, high = move.target, move.target + move.nbytes
        for block, place in [*places.items()]:
            if block != moved and place < high and low < place + self._here[block].nbytes:
                del places[block]

    def _read_by_write_backs(self) -> list[tuple[int, int]]:
        return [(tenant.place, tenant.place + self._rounded(tenant)) for tenant in self._leaving.values()]

    def _owners(self) -> dict[int, int]:
        return {block: self._pager.block(block).place for block in self._pager.resident()}

    def _write_back_of(self, block: int) -> Transfer | None:
        """Return a block's write-back under way, or None.

        During a write-back, the pager may decide to keep the block, and then evict it after all. The write-back under
        way is enough for that: no second one is started.
        """
        transfers: list[Transfer] = self._pager.transfers()
        for transfer in transfers:
            if transfer.block == block and transfer.kind == Kind.WRITE_BACK:
                return transfer
        return None

    def _arrive(self, block: int, place: int) -> None:
        for number, tenant in self._leaving.items():
            if tenant.block == block and tenant.place == place:
                self._stay(number)
                return
        self.generation[block] += 1
        self._here[block] = Tenant(block, place, self._pager.block(block).size)

    def _stay(self, number: int) -> None:
        tenant = self._leaving.pop(number)
        self.generation[tenant.block] += 1
        self._here[tenant.block] = tenant

    def written_back(self, transfer: Transfer, *, failed: bool) -> Tenant | None:
        """Record the end of a write-back, before the pager learns of it.

        Return the block whose range is free now, or None if no range became free.
        """
        tenant = self._leaving.get(transfer.id)
        if tenant is None:
            return None
        # The write failed, or the pager took the block back during it: in both cases the bytes stay valid in their
        # place.
        if failed or self._owners().get(tenant.block) == tenant.place:
            self._stay(transfer.id)
            return None
        del self._leaving[transfer.id]
        return tenant

    def fetched(self, transfer: Transfer) -> Tenant | None:
        """Record the end of a fetch; return the block, or None if the block is not in that range any more."""
        tenant = self._here.get(transfer.block)
        if tenant is None or not all(
            tenant.place <= piece.place < tenant.place + tenant.nbytes for piece in transfer.pieces
        ):
            return None
        tenant.filled = True
        return tenant

    def without_tenants(self, place: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the parts ``(place, bytes)`` of a range that belong to no block and that no write-back reads.

        The pager may have given such a part to a block already. But no bytes arrive there before the pager's commands
        are started.
        """
        return gaps(self._taken(), place, place + nbytes)

    def about_to_be_taken(self) -> list[tuple[int, int]]:
        """Return the parts ``(place, bytes)`` that were free until now and that the pager has just given to a block."""
        coming = [
            (place, place + self._pager.block(block).size)
            for block, place in self._owners().items()
            if block not in self._here or self._here[block].place != place
        ]
        if not coming:
            return []
        free = self.free()
        return [
            (max(low, start), min(high, start + nbytes) - max(low, start))
            for low, high in coming
            for start, nbytes in free
            if low < start + nbytes and start < high
        ]

    def free(self) -> list[tuple[int, int]]:
        """Return the parts ``(place, bytes)`` of the arena that belong to no block and that no write-back reads."""
        return gaps(self._taken(), 0, self._pager.capacity)

    def _taken(self) -> list[tuple[int, int]]:
        taken = [(tenant.place, tenant.place + tenant.nbytes) for tenant in self._here.values()]
        return sorted(taken + self._read_by_write_backs())


def gaps(taken: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """Return parts ``(place, bytes)`` of ``[low, high)`` that none of the sorted ranges ``[start, stop)`` covers."""
    found = []
    for start, stop in (*taken, (high, high)):
        start = min(start, high)
        if start > low:
            found.append((low, start - low))
        low = max(low, stop)
    return found
