"""Watches a pool's arena: fills free ranges with poison, and keeps a generation and a checksum of each block.

It checks three invariants: a block does not change between two accesses; every byte outside all blocks holds poison; a
block has the same content wherever it is moved. If an invariant is broken, the program used memory outside an access.
For example, a tensor outlived its operation, a copy did not wait, or a kernel wrote outside its operand.

The driver tells a watch of commands, ends, grants and releases. All methods are called with the driver's lock held. An
error found in the middle of the pool's own work is kept. It is raised when that work is complete, and again by every
later access, because the pool's bytes cannot be trusted any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from farpool.errors import FarpoolError, LifetimeError, OrderError
from farpool.memory.debug.checked import CheckedOrder, Span
from farpool.memory.debug.memory import Memory
from farpool.memory.debug.tenants import Tenant, Tenants, gaps
from farpool.memory.pager import Access as Grant
from farpool.memory.pager import Kind, Mode, Move, Pager, Transfer
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use

__all__ = ["Watch"]

_COMPARED_BYTES = 1 << 18
"""Number of free bytes that are compared with poison at each release of an access. Each release continues where the
previous one ended."""


@dataclass(slots=True)
class _Frozen:
    """Part of a block that an access must not change, although it may write to the rest."""

    block: int
    place: int
    nbytes: int
    checksum: int


@dataclass(slots=True)
class _Granted:
    """State of a granted access: its operands, their generations and its frozen parts."""

    op: str
    names: dict[int, str]
    generations: dict[int, int]
    writes: frozenset[int]
    frozen: list[_Frozen] = field(default_factory=list)
    writings: dict[int, int] = field(default_factory=dict)


class Watch:
    """Watches the arena of one pool in debug mode.

    Parameters
    ----------
    pager : Pager
    memory : Memory
        The arena.
    """

    def __init__(self, pager: Pager, memory: Memory) -> None:
        self._order = CheckedOrder()
        self._pager = pager
        self._memory = memory
        self._tenants = Tenants(pager)
        self._content: dict[int, int] = {}
        """Checksum of each block whose content is known and which no access may write at the moment."""
        self._granted: dict[Grant, _Granted] = {}
        self._writers: Counter[int] = Counter()
        self._writings: Counter[int] = Counter()
        """For each block, how often an access that may write it was granted or released."""
        self._last_op: dict[int, str] = {}
        self._capacity = 0
        self._looked = 0
        self._in_vain: list[Move] = []
        """Moves whose blocks lost their places after the pager had queued the moves. They are carried out all the
        same."""
        self._findings: list[FarpoolError] = []
        self.follow(())

    # ---- findings -----------------------------------------------------------------------------------------------

    def raise_findings(self) -> None:
        """Raise the first error found so far, if any, as a new exception."""
        if self._findings:
            first = self._findings[0]
            raise type(first)(*first.args)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep an `OrderError` for later accesses, and pass it on to the driver."""
        try:
            yield
        except OrderError as error:
            self._findings.append(OrderError(*error.args))
            raise

    def look(self) -> None:
        """Check all accesses, all free bytes, and all blocks that no access or transfer may be changing now."""
        self.follow(())
        for granted in self._granted.values():
            self._check_generations(granted)
        for tenant in self._tenants:
            if not self._order.under_way(tenant.place, tenant.nbytes):
                self._verify(tenant, "")
        self._check_free(self._pager.capacity)

    def _lifetime(self, message: str) -> None:
        self._findings.append(LifetimeError(message))

    def _name(self, block: int, names: dict[int, str] | None = None) -> str:
        name = (names or {}).get(block) or self._pager.class_of(block)
        return f"block {block} ({name})"

    # ---- following the pager -----------------------------------------------------------------------------------

    def follow(self, commands: Sequence[Transfer | Move]) -> None:
        """Follow the pager's decisions before their `commands` are started; poison the ranges that became free."""
        capacity = self._pager.capacity
        if capacity > self._capacity:
            self._memory.fill(self._capacity, capacity - self._capacity)
        self._capacity = capacity
        if self._memory.readable:
            for place, nbytes in self._tenants.about_to_be_taken():
                self._check_poison(place, nbytes)
        for left in self._tenants.update(commands):
            self._verify(left.tenant, "")
            for place, nbytes in left.free:
                self._vacate(left.tenant, place, nbytes)
            if left.moved is not None and not left.written:
                self._in_vain.append(left.moved)

    def _vacate(self, tenant: Tenant, place: int, nbytes: int) -> None:
        for transfer in self._order.under_way(place, nbytes):
            self._findings.append(
                OrderError(
                    f"{self._name(tenant.block)} gave up arena range [{place}, {place + nbytes}) while transfer "
                    f"{transfer.id} of block {transfer.block} was under way there"
                )
            )
            return
        self._memory.fill(place, nbytes)

    def starting(self, commands: Sequence[Transfer | Move]) -> None:
        """Follow commands and check their order before they are started; raise `OrderError` if one is out of order."""
        # Packing moves bytes inside its own access, and the pager's map does not change with that.
        if not all(isinstance(command, Move) and self._order.is_own(command) for command in commands):
            self.follow(commands)
        with self._kept():
            self._order.starting(commands)

    def moved(self, move: Move) -> None:
        """Record that a block has been moved, and poison its old range."""
        if self._order.is_own(move):
            return
        for index, other in enumerate(self._in_vain):
            if other is move:  # the block has lost its new place since
                del self._in_vain[index]
                self._memory.fill(move.target, self._pager.rounded(move.nbytes))
                break
        stop = move.source + self._pager.rounded(move.nbytes)
        for place, nbytes in gaps([(move.target, move.target + move.nbytes)], move.source, stop):
            self._memory.fill(place, nbytes)

    def ended(self, number: int, failed: bool) -> None:
        """Record that a transfer has ended, before the pager learns of it."""
        transfer = self._order.ended(number, failed=failed)
        if transfer is None:
            return
        if transfer.kind == Kind.WRITE_BACK:
            tenant = self._tenants.written_back(transfer, failed=failed)
            if tenant is not None:
                for place, nbytes in self._tenants.without_tenants(tenant.place, self._pager.rounded(tenant.nbytes)):
                    self._memory.fill(place, nbytes)
        elif transfer.pieces and not failed:
            tenant = self._tenants.fetched(transfer)
            if tenant is not None:
                self._fetched(tenant, transfer)

    def _fetched(self, tenant: Tenant, transfer: Transfer) -> None:
        (piece, *others) = transfer.pieces
        # If the fetch does not bring all bytes of the block, the bytes in the gaps may change, and the old checksum is
        # wrong.
        if others or piece.nbytes != tenant.nbytes:
            self._content.pop(tenant.block, None)
        known = self._content.get(tenant.block)
        self._remember(tenant)
        if known is not None and self._content[tenant.block] != known:
            self._lifetime(
                f"{self._name(tenant.block)} came back from below with other bytes than it left with"
                + self._last_used(tenant.block)
            )

    def collected(self) -> None:
        """Record that the pool has freed the blocks of dropped storages. New blocks may now reuse the numbers."""
        self.follow(())
        for block in self._content.keys() - self._pager.blocks():
            del self._content[block]
            self._last_op.pop(block, None)

    # ---- contents -----------------------------------------------------------------------------------------------

    def _remember(self, tenant: Tenant) -> None:
        if self._memory.readable:
            self._content[tenant.block] = self._memory.checksum(tenant.place, tenant.nbytes)

    def _verify(self, tenant: Tenant, op: str, names: dict[int, str] | None = None) -> None:
        """Compare a block's bytes with their last checksum; record an error if they have changed."""
        known = self._content.get(tenant.block)
        if known is None or not tenant.filled or self._memory.checksum(tenant.place, tenant.nbytes) == known:
            return
        del self._content[tenant.block]  # so that the change is reported only once
        when = f"{op} changed it, although it was only to read it" if op else "changed while no access could write it"
        self._lifetime(
            f"{self._name(tenant.block, names)} at arena offset {tenant.place}: {when}" + self._last_used(tenant.block)
        )

    def _last_used(self, block: int) -> str:
        return f"; the last access before was {self._last_op[block]}" if block in self._last_op else ""

    def _check_free(self, most: int) -> None:
        """Compare at most `most` free bytes with poison, beginning where the previous call ended."""
        if not self._memory.readable:
            return
        free = self._tenants.free()
        first = next((i for i, (place, nbytes) in enumerate(free) if place + nbytes > self._looked), 0)
        for place, nbytes in (*free[first:], *free[:first]):
            looked = min(nbytes, most)
            self._check_poison(place, looked)
            self._looked = place + looked
            most -= looked
            if most <= 0:
                return

    def _check_poison(self, place: int, nbytes: int) -> None:
        changed = self._memory.first_change(place, nbytes)
        if changed >= 0:
            self._memory.fill(place, nbytes)  # so that the change is reported only once
            self._lifetime(
                f"arena offset {changed}, which belongs to no block, was written to: a tensor outlived its operation, "
                "or a kernel wrote outside its operand"
            )

    # ---- accesses -----------------------------------------------------------------------------------------------

    def granted(self, grant: Grant, uses: Sequence[Use], op: str) -> None:
        """Check and record an access that has been granted. If this raises, the driver gives the access up.

        Raises
        ------
        LifetimeError, OrderError
            The first error that was found, in this call or earlier.
        """
        self.follow(())
        op = op or "access"
        blocks = [(b, run.mode) for run in grant.runs for b in range(run.first, run.first + run.count)]
        names = _names(uses)
        for block, mode in blocks:
            if mode != Mode.OVERWRITE:
                self._verify(self._tenants[block], "", names)
        self.raise_findings()
        tenants = [self._tenants[block] for block, _ in blocks]
        with self._kept():
            self._order.pin(
                grant, [Span(t.place, t.nbytes, m != Mode.READ) for t, (_, m) in zip(tenants, blocks, strict=True)], op
            )
        granted = self._granted[grant] = _Granted(
            op,
            names,
            {block: self._tenants.generation[block] for block, _ in blocks},
            frozenset(block for block, mode in blocks if mode != Mode.READ),
        )
        written = [_range_of(use, self._tenants) for use in uses if use.mode != Mode.READ and use.stop > use.start]
        for tenant, (block, mode) in zip(tenants, blocks, strict=True):
            if mode == Mode.READ:
                granted.writings[block] = self._writings[block]
                continue
            self._content.pop(block, None)
            if mode == Mode.OVERWRITE and not self._writers[block] and self._pager.block(block).pins == 1:
                self._memory.fill(tenant.place, self._pager.rounded(tenant.nbytes))
            elif self._memory.readable:
                granted.frozen += self._freeze(tenant, written)
            tenant.filled = True
            self._writers[block] += 1
            self._writings[block] += 1
            granted.writings[block] = self._writings[block]

    def _freeze(self, tenant: Tenant, written: list[tuple[int, int]]) -> list[_Frozen]:
        frozen = []
        low, high = tenant.place, tenant.place + tenant.nbytes
        for start, stop in (*sorted(written), (high, high)):
            start, stop = min(max(start, tenant.place), high), min(stop, high)
            if start > low:
                frozen.append(_Frozen(tenant.block, low, start - low, self._memory.checksum(low, start - low)))
            low = max(low, stop)
        return frozen

    def released(self, grant: Grant) -> None:
        """Check an access that is about to be released. Errors are kept, and `raise_findings` raises the first one."""
        granted = self._granted.pop(grant, None)
        if granted is None:
            return
        self.follow(())
        in_place = self._check_generations(granted)
        for frozen in granted.frozen:
            if (
                frozen.block in in_place
                and self._undisturbed(granted, frozen.block)
                and self._memory.checksum(frozen.place, frozen.nbytes) != frozen.checksum
            ):
                self._lifetime(
                    f"{granted.op} wrote to arena range [{frozen.place}, {frozen.place + frozen.nbytes}) of "
                    f"{self._name(frozen.block, granted.names)}, outside the bytes that it was to write"
                )
        for block in granted.generations:
            if block not in granted.writes:
                if block in in_place and self._undisturbed(granted, block):
                    self._verify(self._tenants[block], granted.op, granted.names)
            else:
                self._writers[block] -= 1
                self._writings[block] += 1
        for block in in_place:
            # A checksum that is taken while another access writes would differ at the next check.
            if block not in self._content and not self._writers[block]:
                self._remember(self._tenants[block])
            self._last_op[block] = granted.op
        self._order.release(grant)
        self._check_free(_COMPARED_BYTES)

    def _undisturbed(self, granted: _Granted, block: int) -> bool:
        """Return True if no other access was allowed to write to the block during the given access."""
        return self._writings[block] == granted.writings[block] and self._writers[block] == (block in granted.writes)

    def _check_generations(self, granted: _Granted) -> list[int]:
        """Return the blocks of an access that have kept their places since the grant; record errors for the rest."""
        in_place = []
        for block, generation in granted.generations.items():
            now = self._tenants.generation[block]
            if now == generation:
                in_place.append(block)
            else:
                self._lifetime(
                    f"{self._name(block, granted.names)} was granted to {granted.op} as generation {generation} and is "
                    f"generation {now} now: its place in the arena changed, or was given away, while the access held it"
                )
        return in_place


def _names(uses: Sequence[Use]) -> dict[int, str]:
    """Return, for each used block, the names of the used storages in it."""
    names: dict[int, str] = {}
    for use in uses:
        if use.stop > use.start:
            storage: Storage = use.storage
            step = storage.block_bytes
            for block in range(storage.first + use.start // step, storage.first + (use.stop - 1) // step + 1):
                names[block] = ", ".join(filter(None, (names.get(block), storage.name or storage.cls)))
    return names


def _range_of(use: Use, tenants: Tenants) -> tuple[int, int]:
    """Return the offsets in the arena at which the bytes of a granted use begin and end."""
    storage: Storage = use.storage
    index, inside = divmod(use.start, storage.block_bytes)
    place = tenants[storage.first + index].place + storage.offset + inside
    return place, place + use.stop - use.start
