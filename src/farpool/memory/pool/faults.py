"""Errors for users, made from refusals of the pager and failures of tiers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from farpool.errors import BudgetError, NodeTimeoutError, PoolFullError, TierError, TierTimeoutError
from farpool.memory.pager import NoRoomError, TooLargeError
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use, describe
from farpool.memory.pool.need import smallest_budget, uses_of_layers
from farpool.memory.tiers import Tier
from farpool.sizes import format_size

__all__ = ["does_not_fit", "no_room", "operands_too_large", "with_tier_and_block"]


def operands_too_large(
    error: TooLargeError, uses: Sequence[Use], op: str, budget: int, storages: Collection[Storage], alignment: int
) -> BudgetError:
    """Make the error for operands that do not fit into the fast tier together.

    The message names the operation, its operands, and the smallest budget with which a whole step works in a new pool.
    If this pool was made smaller, its blocks keep their former size, so the step may need a larger budget in it.

    Parameters
    ----------
    storages : collection of Storage
        All storages of the pool.
    alignment : int
        Alignment in bytes of storages that share a block.
    """
    alone = smallest_budget([uses], storages, alignment)
    needed = smallest_budget([uses, *uses_of_layers(storages, uses)], storages, alignment)
    if needed <= budget:
        alone = needed = max(needed, int(error.args[0]))
    others = "" if needed == alone else f"; this operation alone would work with {alone}, other layers would not"
    return BudgetError(
        f"{op or 'access'}: its operands do not fit into the fast tier together: {describe(uses)}; the budget is "
        f"{format_size(budget)}, the smallest that works is {needed} bytes ({format_size(needed)}){others}",
        op=op,
        needed=needed,
        budget=budget,
    )


def does_not_fit(what: str, nbytes: int, used: int, fast: int, tiers: Sequence[Tier], block: int) -> PoolFullError:
    """Make the error for a new storage that does not fit into all tiers together.

    The message names the number of missing bytes, the sizes of the tiers, and a remedy.
    """
    sizes = [("fast", fast), *[(tier.info.name, tier.info.capacity) for tier in tiers]]
    capacity = sum(size for _, size in sizes)
    lacking = nbytes - (capacity - used)
    return PoolFullError(
        f"{what}: {format_size(nbytes)} do not fit: the pool holds {format_size(used)} of {format_size(capacity)} in "
        f"all tiers ({', '.join(f'{name} {format_size(size)}' for name, size in sizes)}), so {lacking} bytes "
        f"({format_size(lacking)}) lack; {_remedy(tiers, lacking + block)}, or drop tensors",
        lacking=lacking,
    )


def no_room(error: NoRoomError, op: str, tiers: Sequence[Tier]) -> PoolFullError:
    """Make the error for a block that must be evicted although no lower tier has room for it.

    The message names the number of missing bytes, the reserved bytes and capacity of each tier, and a remedy.
    """
    nbytes = int(error.args[1])
    full = ", ".join(
        f"{tier.info.name} {format_size(tier.reserved)} of {format_size(tier.info.capacity)}" for tier in tiers
    )
    free = max((tier.info.capacity - tier.reserved for tier in tiers), default=0)
    lacking = nbytes - free if nbytes > free else nbytes  # free room in pieces does not help
    return PoolFullError(
        f"{op or 'access'}: a block of {format_size(nbytes)} has to leave the fast tier and no lower tier "
        f"takes it ({full or 'there is none'}), {lacking} bytes lack; {_remedy(tiers, nbytes)}, set a larger fast=, or "
        "drop tensors",
        lacking=lacking,
    )


def _remedy(tiers: Sequence[Tier], more: int) -> str:
    """Advise which setting to change to get `more` bytes of room."""
    if not tiers:
        return f'add a lower tier, such as Pool(..., dram="{_whole_size(more)}")'
    info = tiers[-1].info
    return f'set the size of {info.name!r} to "{_whole_size(info.capacity + more)}" or more'


def _whole_size(nbytes: int) -> str:
    """Format a size as a setting accepts it, rounded up to whole KiB or MiB."""
    unit, name = (1 << 20, "MiB") if nbytes >= 1 << 20 else (1 << 10, "KiB")
    return f"{-(-nbytes // unit)}{name}"


def with_tier_and_block(error: BaseException, tier: str, block: int) -> TierError:
    """Make a `TierError` whose message and attributes name the tier and the block. Its cause is `error`.

    A `block` of -1 is one that has no number yet.
    """
    kind = type(error) if isinstance(error, TierError) else TierError
    if isinstance(error, NodeTimeoutError):
        kind = TierTimeoutError
    detail = str(error) if isinstance(error, TierError) else f"{type(error).__name__}: {error}"
    numbered = block >= 0
    where = f"tier {tier!r}, block {block}" if numbered else f"tier {tier!r}"
    named = kind(f"{where}: {detail}", tier=tier, block=block if numbered else None)
    named.__cause__ = error
    return named
