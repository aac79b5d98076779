"""Features of the wire protocol: additions to it that not every release has (docs/wire.md).

The client's hello says which features the client has. The node chooses those that it has as well, and its challenge
says which these are. Both sides then use the chosen features, and no others. A feature has a bit, by which releases
that know it agree on it, and a name, by which a release that does not know it can refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from farpool.errors import IncompatibleError

__all__ = [
    "CLAIMS",
    "COPY_ORDERS",
    "FEATURES",
    "FEATURES_BITS",
    "NAME_CHARACTERS_MAX",
    "RETENTION",
    "Feature",
    "Features",
]

FEATURES_BITS = 63
"""Number of bits for features: each of them fits into a signed integer of 64 bits in every language."""
NAME_CHARACTERS_MAX = 32


@dataclass(frozen=True, slots=True)
class Feature:
    """One addition to the protocol.

    Attributes
    ----------
    bit : int
        Number of its bit, from 0 to `FEATURES_BITS` - 1. A bit is never used again for another feature.
    name : str
        Its name, for people and for releases that do not know its bit.
    since : str
        The first release of farpool that has it.
    client_requires : bool
        True if this release's clients cannot work with a node that lacks it.
    node_requires : bool
        True if this release's nodes cannot work with a client that lacks it.
    """

    bit: int
    name: str
    since: str
    client_requires: bool = False
    node_requires: bool = False


class Features:
    """The features that a release has.

    Parameters
    ----------
    features : iterable of Feature
        The features, with different bits and names.
    """

    def __init__(self, features: Iterable[Feature] = ()) -> None:
        self._features = tuple(features)
        self.bits = sum(1 << one.bit for one in self._features)
        """The bits of all features."""
        self.required_by_client = tuple(one.name for one in self._features if one.client_requires)
        """Names of the features that this release's clients require."""
        if self.bits.bit_count() != len(self._features) or len({one.name for one in self._features}) != len(
            self._features
        ):
            raise ValueError("two features of the protocol have the same bit or the same name")

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features)

    def chosen(self, offered: int, required: Iterable[str]) -> int:
        """Return the bits that a node of this release chooses for a client.

        Parameters
        ----------
        offered : int
            Bits of the client's features.
        required : iterable of str
            Names of the features that the client requires.

        Raises
        ------
        IncompatibleError
            The node lacks a feature that the client requires, or the client lacks one that the node requires.
        """
        own = {one.name for one in self._features}
        if lacking := [name for name in required if name not in own]:
            raise IncompatibleError(
                f"the client requires {_listed(lacking)}, which this node does not have; upgrade the node to the "
                "client's release of farpool or a later one"
            )
        lacking_here = [one for one in self._features if one.node_requires and not offered >> one.bit & 1]
        if lacking_here:
            raise IncompatibleError(
                f"this node requires {_listed(one.name for one in lacking_here)}, which the client does not have; "
                f"upgrade the client to farpool {_last(lacking_here)} or later"
            )
        return offered & self.bits

    def check(self, chosen: int, node: str) -> None:
        """Check, as a client of this release, the bits that a node has chosen.

        Parameters
        ----------
        chosen : int
            The bits.
        node : str
            The node's address.

        Raises
        ------
        IncompatibleError
            The node chose a feature that the client did not offer, or lacks one that the client requires.
        """
        if unknown := chosen & ~self.bits:
            raise IncompatibleError(
                f"{node} wants features {unknown:#x} of the protocol, which this farpool does not have and did not "
                "offer; upgrade this program to the node's release of farpool",
                node=node,
            )
        if lacking := [one for one in self._features if one.client_requires and not chosen >> one.bit & 1]:
            raise IncompatibleError(
                f"{node} does not have {_listed(one.name for one in lacking)}, which this farpool requires; upgrade "
                f"the node to farpool {_last(lacking)} or later",
                node=node,
            )

    def require(self, feature: Feature, chosen: int, node: str) -> None:
        """Check, before a client uses a feature, that its connection has the feature.

        Parameters
        ----------
        feature : Feature
            The feature.
        chosen : int
            Bits of the features that the node has chosen.
        node : str
            The node's address.

        Raises
        ------
        IncompatibleError
            The node does not have the feature.
        """
        if not chosen >> feature.bit & 1:
            raise IncompatibleError(
                f"{node} does not have {_listed([feature.name])}, which this call needs; upgrade the node to farpool "
                f"{feature.since} or later",
                node=node,
            )

    def names(self, bits: int) -> tuple[str, ...]:
        """Return the names of the features with these bits; a feature that this release does not know has none."""
        return tuple(one.name for one in self._features if bits >> one.bit & 1)


RETENTION = Feature(0, "retention", "0.1.0")
"""Operations ``retain`` and ``end_session``, and priorities in puts."""
COPY_ORDERS = Feature(1, "copy-orders", "0.1.0")
"""Control call ``copy``: a node copies an object from another node."""
CLAIMS = Feature(2, "claims", "0.1.0")
"""Control calls for leases of a pool: ``claim``, ``order``, ``holdings``."""
FEATURES = Features([RETENTION, COPY_ORDERS, CLAIMS])
"""The features of this release. A line is added here for each one, and never taken away."""


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    return f"the feature{'s' if len(shown) > 1 else ''} {', '.join(shown)} of the protocol"


def _last(features: Iterable[Feature]) -> str:
    """Return the latest of the releases that the features came with."""
    return max((one.since for one in features), key=lambda text: [int(part) for part in text.split(".")])
