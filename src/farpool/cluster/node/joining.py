"""Settings with which a node joins the pool of a registry, and what it tells the registry about itself."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from farpool.abc.registry import Registry
from farpool.checks import require_seconds
from farpool.cluster.node.logs import log
from farpool.cluster.wire.address import Address
from farpool.errors import ConfigError

if TYPE_CHECKING:
    from farpool.cluster.members.registration import Registration

__all__ = ["Joining"]

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}", re.ASCII)
_LABEL_CHARACTERS_MAX = 128
_TTL_MIN_S = 1.0
_TTL_MAX_S = 3600.0
_SLOW_START_MAX_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Joining:
    """Settings of a node that joins a pool, as `Node` explains them. Without a registry the node joins none."""

    registry: Registry | str | os.PathLike[str] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    advertise: tuple[Address, ...] = ()
    ttl: float = 3.0
    slow_start: float = 60.0

    def check(self, host: str) -> None:
        """Check the settings before anything is opened.

        Parameters
        ----------
        host : str
            IP address at which the node will listen.

        Raises
        ------
        ConfigError
            A setting is wrong, or needs another one.
        """
        if self.registry is None:
            if self != Joining():
                raise ConfigError(
                    "--label, --weight, --advertise, --member-ttl and --slow-start are for members of a pool; give "
                    "--registry URL, too",
                    setting="registry",
                )
            return
        for name, value in self.labels.items():
            if not _LABEL.fullmatch(name) or not 0 < len(value) <= _LABEL_CHARACTERS_MAX or not value.isprintable():
                raise ConfigError(
                    f"--label is {f'{name}={value}'!r}, expected NAME=VALUE: a name of 1 to 63 letters, digits, dots, "
                    f"dashes, underscores or slashes, and a value of 1 to {_LABEL_CHARACTERS_MAX} characters",
                    setting="labels",
                )
        if isinstance(self.weight, bool) or not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(f"--weight is {self.weight!r}, expected a number, at least 0", setting="weight")
        require_seconds(self.ttl, "--member-ttl", _TTL_MIN_S, _TTL_MAX_S, setting="member_ttl")
        require_seconds(self.slow_start, "--slow-start", 0.0, _SLOW_START_MAX_S, setting="slow_start")
        for address in self.advertise:
            if address.scheme == "unix" or _is_wildcard(address.host):
                raise ConfigError(
                    f"--advertise is {str(address)!r}, expected HOST:PORT at which other hosts reach this node",
                    setting="advertise",
                )
        if not self.advertise and _is_wildcard(host):
            raise ConfigError(
                f"--listen is {host}, which stands for all addresses of this host, so the other members of the pool "
                "cannot know how to reach this node; give --advertise HOST:PORT (port 0 for the port of --listen)",
                setting="advertise",
            )

    def addresses(self, listening: Address) -> tuple[str, ...]:
        """Return the addresses that the pool's programs get, if the node listens at `listening`."""
        addresses = [
            str(replace(address, scheme=listening.scheme, port=address.port or listening.port))
            for address in self.advertise or (listening,)
        ]
        return tuple(dict.fromkeys(addresses))

    def register(
        self,
        identity: bytes,
        name: str,
        listening: Address,
        media: dict[str, int],
        folder: Path,
        cancelled: threading.Event,
        *,
        kept: bool,
        follow: Callable[[bool], None],
    ) -> Registration:
        """Join the pool. The member is not ready yet.

        Parameters
        ----------
        identity : bytes
            The node's identity.
        name : str
            The node's name.
        listening : Address
            Address at which the node listens.
        media : dict of str to int
            Bytes that the node lends, by medium.
        folder : Path
            The node's folder, which this process has locked.
        cancelled : threading.Event
            Event that ends the wait for a registry that does not answer.
        kept : bool
            False for a node that keeps nothing when it stops.
        follow : callable
            Called with True once the member's record says that it drains, and with False once it no longer does.

        Raises
        ------
        ConfigError
            The registry does not answer or refuses, or another process is this member.
        """
        # Imported here: most nodes have no registry and are to start at once.
        from farpool.cluster.members.records import MemberRecord
        from farpool.cluster.members.registration import Registration
        from farpool.cluster.node.speed import copy_rates

        assert self.registry is not None
        record = MemberRecord(
            addresses=self.addresses(listening),
            name=name,
            labels=dict(self.labels),
            weight=self.weight,
            full_weight=self.weight,
            media=media,
            bandwidth=copy_rates(folder, media),
            joined=time.time(),
            version=version("farpool"),
        )
        made = Registration(
            *(self.registry, identity, record, folder),
            ttl=self.ttl,
            slow_start=self.slow_start,
            kept=kept,
            log=log,
            follow=follow,
        )
        try:
            made.begin(cancelled=cancelled)
        except BaseException:
            made.close()
            raise
        return made


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:  # a name
        return False
