"""Settings that all parts of `Names` share."""

from __future__ import annotations

from dataclasses import dataclass

from farpool.abc.objects import ObjectStore
from farpool.abc.registry import Registry

__all__ = ["Context"]


@dataclass(frozen=True, slots=True)
class Context:
    """Settings of `Names`: where a program stores objects and names, and for how long.

    Attributes
    ----------
    store : ObjectStore
        Store of the objects.
    registry : Registry
        Registry of the names.
    who : str
        Name of this program, which other programs show to people.
    hold : float
        Seconds that a version stays readable after another version has replaced it.
    orphan_ttl : float
        Seconds after which objects expire if their publish does not finish.
    timeout : float
        Seconds that a call may wait for the registry.
    """

    store: ObjectStore
    registry: Registry
    who: str
    hold: float
    orphan_ttl: float
    timeout: float
