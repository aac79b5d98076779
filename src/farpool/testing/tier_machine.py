"""Random operations on a tier. Their results are compared with a dictionary that models a perfect tier."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from farpool.abc.tier import Extent, Tier
from farpool.errors import TierFullError

__all__ = ["TierMachine", "tier_machine"]

_SIZES = st.one_of(
    st.sampled_from([1, 63, 64, 65, 4095, 4096, 4097, 65536, 524288, 524289]),
    st.integers(1, 10_000),
)


class TierMachine(RuleBasedStateMachine):
    """State machine that reserves, writes, reads and frees extents; reads must agree with a dictionary.

    Subclasses define :meth:`make_tier`; :func:`tier_machine` makes such a subclass.
    """

    extents: Bundle[Extent] = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.make_tier()
        self.tier.open()
        self.model: dict[Extent, bytes | None] = {}

    def make_tier(self) -> Tier:
        """Make a closed tier with a capacity of at least 1 MiB."""
        raise NotImplementedError("give TierMachine a make_tier(), or use tier_machine()")

    def teardown(self) -> None:
        """Close the tier; Hypothesis calls it after each run."""
        self.tier.close()

    @rule(target=extents, nbytes=_SIZES)
    def reserve(self, nbytes: int) -> Extent:
        """Reserve an extent. If the tier reports that it is full, check that nothing was reserved."""
        before = self.tier.reserved
        try:
            extent = self.tier.reserve(nbytes)
        except TierFullError:
            assert self.tier.reserved == before
            return multiple()  # type: ignore[return-value]  # Hypothesis's way to add nothing to the bundle
        assert extent.nbytes == nbytes
        for other in self.model:
            assert extent.offset + nbytes <= other.offset or other.offset + other.nbytes <= extent.offset, (
                f"{extent} overlaps {other}"
            )
        self.model[extent] = None
        return extent

    @rule(extent=extents, seed=st.integers(0, 2**32), shift=st.sampled_from([0, 1, 8, 64]))
    def write(self, extent: Extent, seed: int, shift: int) -> None:
        """Write to an extent, from aligned or unaligned memory."""
        data = random.Random(seed).randbytes(extent.nbytes)
        buffer = memoryview(bytearray(shift) + data)[shift:]
        self.tier.write_from(extent, buffer)
        self.model[extent] = data

    @rule(extent=extents, shift=st.sampled_from([0, 1, 8, 64]))
    def read(self, extent: Extent, shift: int) -> None:
        """Read an extent and compare it with the bytes written last."""
        expected = self.model[extent]
        if expected is None:
            return  # a fresh extent's bytes are unspecified
        buffer = bytearray(shift + extent.nbytes + 8)
        self.tier.read_into(extent, memoryview(buffer)[shift : shift + extent.nbytes])
        assert buffer[shift : shift + extent.nbytes] == expected
        assert not any(buffer[:shift]), "a read wrote in front of its buffer"
        assert not any(buffer[-8:]), "a read wrote behind its buffer"

    @rule(extent=consumes(extents))
    def free(self, extent: Extent) -> None:
        """Free an extent."""
        self.tier.free(extent)
        del self.model[extent]

    @invariant()
    def reserved_bytes_are_accounted(self) -> None:
        """Check that the tier's reserved bytes cover the extents of the model and do not exceed the capacity."""
        wanted = sum(extent.nbytes for extent in self.model)
        assert wanted <= self.tier.reserved <= self.tier.info.capacity
        if not self.model:
            assert self.tier.reserved == 0


def tier_machine(make: Callable[[], Tier]) -> type[TierMachine]:
    """Return a state machine for tiers made by `make`, for ``hypothesis.stateful.run_state_machine_as_test``."""

    class Machine(TierMachine):
        def make_tier(self) -> Tier:
            return make()

    return Machine
