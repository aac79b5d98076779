"""A node's own entry in the list of members of a registry: the node writes it, and keeps it alive while it runs.

At each *turn*, the node reads its record and its role (`farpool.cluster.members.records`), compares them with what they
are to be, and writes what differs. So it makes no difference why an entry is missing or old: a lease that ended while
the process was stopped, a registry that was restored from a backup or replaced, or a slow start that is under way.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from farpool.abc.registry import Condition, Delete, Entry, Put, Registry
from farpool.closing import Closing
from farpool.cluster.members.records import (
    ALIVE,
    MEMBERS,
    RECORD,
    AliveRecord,
    MemberRecord,
    alive_key,
    decode,
    encode,
    record_key,
    removed_key,
    sharing,
)
from farpool.cluster.members.slow_start import STEPS, step_of, weight_at
from farpool.cluster.registry.location import open_registry, without_password
from farpool.cluster.roles.session import HeldRole, Session
from farpool.cluster.wire.host import host_id
from farpool.decoding import prepared
from farpool.errors import (
    ConfigError,
    RegistryAwayError,
    RegistryDamagedError,
    RegistryError,
    RegistryLeaseError,
    RegistryReplacedError,
)

__all__ = ["FILE", "Registration"]

FILE = "registration"
"""Name of the file in the node's folder that says which lease the node had last."""
START_TIMEOUT_S = 30.0
"""Seconds for which a node that starts waits for its registry."""
RETURN_TIMEOUT_S = 3.0
"""Seconds for which a node that was a member of this registry waits for it. Then the node starts, because programs know
its address and look for its objects there, and registers once the registry answers."""
_TURNS_PER_TTL = 3
_TURN_S_MAX = 5.0
_CALL_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 2.0
"""Seconds that a node that stops waits for a registry that does not answer."""
_ATTEMPTS = 3
"""Number of attempts in one turn to write a record that other programs change at the same time."""
_PAUSE_S = 0.2
"""Pause in seconds between two attempts to reach the registry at the start."""
_LEASE_END_MARGIN_S = 2.0
"""Seconds that the registry may take to end a lease whose time is over. etcd looks for them every half second."""

_Log = Callable[..., None]


class _Former(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `FILE`: the lease that the node had when it last ran.

    Attributes
    ----------
    registry : str
        Address of the registry, without secrets.
    lease : int
        Number of the lease.
    identity : str
        The node's identity, in hexadecimal digits.
    place : str
        The host and the file itself, so that a copy of the file is recognized: the lease belongs to the node with the
        original, which may run.
    draining : bool
        True if the member's record said that it drains.
    """

    registry: str
    lease: int
    identity: str
    place: str
    draining: bool = False


class _TakenError(ConfigError):
    """Another process that is up has this node's identity, or one of its addresses.

    Attributes
    ----------
    event : str
        Which of the two it is, for the log.
    process : str
        Host and process number of the other process.
    seconds : float
        Seconds after which the registry counts that process as down if it has ended.
    """

    def __init__(self, event: str, role: Entry | None, registry: Registry, what: str, setting: str) -> None:
        self.event, self.process, self.seconds = event, "another process", _LEASE_END_MARGIN_S
        if role is not None:
            with suppress(RegistryDamagedError):
                self.process = decode(role, AliveRecord).process or self.process
            with suppress(RegistryLeaseError):  # it has just ended
                self.seconds += registry.remaining(role.lease)
        super().__init__(
            f"{self.process}{what}; if it has ended, start this node again in {math.ceil(self.seconds)} seconds",
            setting=setting,
        )


class Registration(Closing):
    """Membership of a running node. Call `begin`, then `ready`, and at the end `close`.

    Parameters
    ----------
    registry : Registry or str or path-like
        The registry, or its address. A registry that is given as an address is opened and closed here, and opened again
        after it was replaced.
    identity : bytes
        The node's identity.
    record : MemberRecord
        The node's record as its settings have it, with the full weight.
    folder : path-like
        The node's folder, which this process has locked.
    ttl : float
        Seconds after which the registry counts the node as down if it hears nothing.
    slow_start : float
        Seconds over which the weight of an empty node that joins grows; 0 for the full weight at once.
    kept : bool
        False for a node that ends for good when it stops: `close` then deletes its record.
    log : callable
        Function that logs an event with its `level` and its fields.
    follow : callable
        Called with True once the record says that the member drains, and with False once it no longer does. It is
        called by `begin` and later by the thread that keeps the member alive.
    """

    def __init__(
        self,
        registry: Registry | str | os.PathLike[str],
        identity: bytes,
        record: MemberRecord,
        folder: str | os.PathLike[str],
        *,
        ttl: float,
        slow_start: float,
        kept: bool,
        log: _Log,
        follow: Callable[[bool], None] = lambda draining: None,
    ) -> None:
        self._where = None if isinstance(registry, Registry) else registry
        self._registry = registry if isinstance(registry, Registry) else None
        self._identity, self._own = identity, record
        self._path = Path(folder) / FILE
        self._ttl, self._slow_start, self._kept, self._log = ttl, slow_start, kept, log
        self._follow, self._drains = follow, False
        self._record_key, self._alive_key = record_key(identity), alive_key(identity)
        self._removed_key = removed_key(identity)
        self._call_timeout = _CALL_TIMEOUT_S
        self._session: Session | None = None
        self._held: HeldRole | None = None
        self._former_key = ""  # key of the record that this folder's last process had
        self._dead: list[Entry] = []  # records of members that are down and had this node's address or folder
        self._process = f"{socket.gethostname()}, process {os.getpid()}"
        self._is_ready = False
        self._is_late = False  # the registry did not answer at the start
        self._is_empty = True
        self._joined = False  # the record did not exist before this start
        self._removed = False  # a person removed the member since this process has joined
        self._last: MemberRecord | None = None  # the record as the registry last had it
        self._step = STEPS
        self._next_step = 0.0
        self._lease, self._drained = 0, False  # as written into the file
        self._registered = False
        self._reached = time.monotonic()
        self._trouble = ""  # the kind of trouble that the log has told already
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Address of the registry without secrets; empty before `begin`."""
        return "" if self._registry is None else self._registry.address

    @property
    def registered(self) -> bool:
        """True if the registry had this node as its member when it was last asked, and answered."""
        return self._registered

    @property
    def is_late(self) -> bool:
        """True if the node started without an answer of the registry, and has not registered since."""
        return self._is_late

    @property
    def silence(self) -> float:
        """Seconds since the registry last answered."""
        return time.monotonic() - self._reached

    # The start

    def begin(self, timeout: float = START_TIMEOUT_S, cancelled: threading.Event | None = None) -> None:
        """Become the process that is this member, and write the record. The member is not ready yet.

        If the registry does not answer, and this node was a member of it when it last ran, the node registers later.

        Parameters
        ----------
        timeout : float
            Maximum seconds to wait for a registry that does not answer.
        cancelled : threading.Event, optional
            Event that ends this wait.

        Raises
        ------
        ConfigError
            The registry did not answer in time or refused, or another process is this member.
        """
        cancelled = cancelled or threading.Event()
        begun = time.monotonic()
        deadline = until = begun + timeout
        former = self._read_file()
        self._drained = former is not None and former.identity == self._identity.hex() and former.draining
        self._call_timeout = min(_CALL_TIMEOUT_S, timeout)
        while True:
            try:
                self._join()
                return
            except _TakenError as error:
                # Perhaps the lease of an earlier process of this node, or of this address, has not ended yet.
                if self._trouble != error.event:
                    until = min(deadline, time.monotonic() + error.seconds)
                    seconds = round(error.seconds, 1)
                    self._tell(
                        error.event, "waiting for the end of another process", level=logging.INFO, seconds=seconds
                    )
                wrong: ConfigError = error
            except (RegistryAwayError, RegistryLeaseError) as error:
                if time.monotonic() >= begun + RETURN_TIMEOUT_S and self._was_member():
                    self._is_late = True
                    self._tell("late", "the node starts without its registry", level=logging.WARNING, reason=str(error))
                    if self._drained:  # until the registry says something else
                        self._drains = True
                        self._follow(True)
                    return
                until = deadline
                self._tell("away", "waiting for the registry", level=logging.WARNING, reason=str(error))
                wrong = ConfigError(
                    f"--registry: {error}; start the registry, or leave out --registry: then the node serves programs "
                    "that name its address",
                    setting="registry",
                )
            except RegistryError as error:
                raise ConfigError(f"--registry: {error}", setting="registry") from error
            if cancelled.wait(_PAUSE_S) or time.monotonic() >= until:
                raise wrong

    def _join(self) -> None:
        registry, session = self._opened()
        self._end_former(registry)
        self._note_lease(registry, session.lease())
        # Not at another attempt, because an earlier one may have written the record already.
        self._joined = self._joined or registry.get(self._record_key) is None
        held = self._take(registry, session)
        self._note_lease(registry, held.lease)
        held.commit([], [Delete(self._removed_key)])
        entry = registry.get(self._record_key)
        present = _present(entry)
        if self._slow_start > 0 and self._joined:
            self._step = 0
        elif self._slow_start > 0 and present is not None:
            self._step = step_of(present.weight, present.full_weight)
        self._write_record(registry, held, entry)
        self._reached = time.monotonic()
        self._trouble = ""

    def _was_member(self) -> bool:
        """Return True if this node was a member of this registry when it last ran."""
        former = self._read_file()
        return (
            former is not None
            and former.identity == self._identity.hex()
            and (self._registry is None or former.registry == self._registry.address)
        )

    def _opened(self) -> tuple[Registry, Session]:
        if self._registry is None:
            assert self._where is not None
            self._registry = open_registry(self._where, timeout=self._call_timeout)
        if self._session is None:
            self._session = Session(self._registry, self._ttl, timeout=self._call_timeout)
        return self._registry, self._session

    def _end_former(self, registry: Registry) -> None:
        """End the lease of this node's last process, and note which member it was."""
        former = self._read_file()
        if former is None or former.registry != registry.address:
            return
        identity = bytes.fromhex(former.identity)
        # We have the lock of the folder, so that process is gone. But the lease is certainly that process's only if its
        # role has it: another registry may have come to this address.
        role = registry.get(alive_key(identity))
        if role is not None and role.lease == former.lease:
            registry.revoke(former.lease)
        self._former_key = record_key(identity)

    def ready(self, *, empty: bool) -> None:
        """Tell the registry that the node serves now, and keep the member alive from now on.

        Parameters
        ----------
        empty : bool
            True if the node has no objects. If it also is new in this registry, its weight grows slowly.
        """
        self._is_ready, self._is_empty = True, empty
        self._call_timeout = _CALL_TIMEOUT_S
        if self._joined and not empty:
            self._step = STEPS
        self._next_step = time.monotonic() + self._slow_start / STEPS
        self._try_turn()
        self._thread = threading.Thread(target=self._keep, name="farpool-registration", daemon=True)
        self._thread.start()

    # While the node runs

    def _keep(self) -> None:
        while not self._closed.wait(self._pause()):
            self._try_turn()

    def _pause(self) -> float:
        pause = min(_TURN_S_MAX, self._ttl / _TURNS_PER_TTL)
        # A turn of a node that is no member now takes no step, so the time of the next one may be over.
        is_growing = self._registered and self._step < STEPS
        return max(0.01, min(pause, self._next_step - time.monotonic())) if is_growing else pause

    def _try_turn(self) -> None:
        """Make one turn; log an error if it is of another kind than the last turn's."""
        try:
            self._registered = self._turn()
        except _TakenError as error:
            self._registered, self._reached = False, time.monotonic()
            self._tell(error.event, error.event, level=logging.ERROR, process=error.process, reason=str(error))
        except RegistryLeaseError:  # the role was lost during the turn; the next one takes it again
            self._registered = False
        except RegistryReplacedError as error:
            self._registered = False
            self._tell("replaced", "the registry was replaced", level=logging.ERROR, reason=str(error))
            self._reopen()
        except RegistryAwayError as error:
            self._registered = False
            self._tell(
                "away", "the registry does not answer; the node goes on", level=logging.WARNING, reason=str(error)
            )
        except Exception as error:  # this thread must not end, or the node would be missing from the list for good
            self._registered = False
            self._tell(type(error).__name__, "not registered", level=logging.ERROR, reason=str(error))
        else:
            self._reached = time.monotonic()
            if self._registered and self._trouble:
                self._trouble = ""
                self._log("registered again", registry=self.address)

    def _turn(self) -> bool:
        """Write what differs from what is to be in the registry; return False if this node is no member now."""
        registry, session = self._opened()
        if self._is_late:
            self._join_late()
        snapshot = registry.range(self._record_key, self._alive_key, self._removed_key)
        entries = {entry.key: entry for entry in snapshot.entries}
        role, record = entries.get(self._alive_key), entries.get(self._record_key)
        held = self._held
        if held is None or held.lost or role is None or role.revision != held.token:
            held = self._take(registry, session)
            self._note_lease(registry, held.lease)
        # A registry that lost everything since then has no key that says so.
        self._removed = self._removed_key in entries or (self._removed and record is None)
        if self._removed:
            self._tell("removed", "this member was removed; restart the node to join again", level=logging.WARNING)
            return False
        if self._step < STEPS and time.monotonic() >= self._next_step:
            self._step += 1
            self._next_step = time.monotonic() + self._slow_start / STEPS
        # The record first: when the member becomes ready, its record is the present one.
        self._write_record(registry, held, record)
        if role is None or role.revision != held.token or role.value != self._alive():
            held.replace(self._alive())
        if self._is_ready:
            self._delete_dead(held)
        return True

    def _join_late(self) -> None:
        """Do at a turn what the start could not do without the registry."""
        trouble = self._trouble
        self._join()
        if self._joined and not self._is_empty:  # another registry has taken the place of the one that was away
            self._step = STEPS
        self._is_late, self._trouble = False, trouble  # so that the log has the end of the trouble

    def _take(self, registry: Registry, session: Session) -> HeldRole:
        """Return the role, which may have to be taken first.

        Raises
        ------
        _TakenError
            Another process that is up has the role, or one of this node's addresses.
        """
        if self._held is not None:
            with suppress(RegistryLeaseError):  # the session then knows that it has lost the role
                self._held.confirm()
                return self._held
        living: list[tuple[str, Entry]] = []
        with suppress(RegistryDamagedError):  # damage of one member is no reason that another one does not join
            entries = registry.range(MEMBERS).entries
            living, dead = sharing(entries, self._identity, self._own.addresses)
            former = [entry for entry in entries if entry.key == self._former_key != self._record_key]
            self._dead = [*former, *(entry for entry in dead if entry not in former)]
        for address, role in living:
            event = "another member has this node's address"
            raise _TakenError(
                event,
                role,
                registry,
                f" has the address {address} as the member {role.key.removeprefix(ALIVE)} of the registry "
                f"{registry.address}, so programs would not find this node; stop that process, give this node "
                "another address with --advertise or --listen, or remove that member with 'farpool members remove "
                "--force'",
                "advertise",
            )
        self._held = session.take(self._alive_key, self._alive())
        if self._held is None:
            raise _TakenError(
                "another process is this member",
                registry.get(self._alive_key),
                registry,
                f" is already the member {self._identity.hex()} of the registry {registry.address}, so this node's "
                f"folder is a copy of that one's; stop that process, or delete {self._path.parent}/identity, and this "
                "node becomes another member",
                "folder",
            )
        return self._held

    def _write_record(self, registry: Registry, held: HeldRole, entry: Entry | None) -> None:
        """Write the record unless it is as it is to be; `entry` is the present one."""
        for _ in range(_ATTEMPTS):
            present = _present(entry)
            wanted = self._wanted(present)
            if present == wanted:
                self._note_record(present)
                return
            if self._closed.is_set():  # `close` did not wait for this turn, and may have deleted the record
                return
            conditions = [
                Condition(self._record_key, 0 if entry is None else entry.revision),
                Condition(self._removed_key, 0),
            ]
            if held.commit(conditions, [Put(self._record_key, encode(wanted))]).succeeded:
                self._note_record(wanted)
                return
            entry = registry.get(self._record_key)  # another program has changed it

    def _note_record(self, record: MemberRecord) -> None:
        self._last = record
        if record.draining is not self._drains:
            self._drains = record.draining
            self._follow(record.draining)
        if self._lease and record.draining is not self._drained:
            self._note(self.address, self._lease, draining=record.draining)

    def _delete_dead(self, held: HeldRole) -> None:
        """Delete the records of members that are gone: this node has their addresses, or one's folder."""
        for entry in self._dead:
            identity = entry.key.removeprefix(RECORD)
            is_unchanged = [Condition(entry.key, entry.revision), Condition(ALIVE + identity, 0)]
            if held.commit(is_unchanged, [Delete(entry.key)]).succeeded:
                self._log("removed a member that is gone", member=identity)
        self._dead = []

    def _wanted(self, present: MemberRecord | None) -> MemberRecord:
        """Return the record as it is to be: the node's own settings, and what others have written."""
        weight = weight_at(self._own.full_weight, self._step)
        known = present or self._last  # a registry that was replaced has no record, but the member still drains
        if known is None:
            return msgspec.structs.replace(self._own, weight=weight)
        return msgspec.structs.replace(self._own, weight=weight, draining=known.draining, joined=known.joined)

    def _alive(self) -> bytes:
        return encode(AliveRecord(ready=self._is_ready, returns=not self._joined, process=self._process))

    def _reopen(self) -> None:
        if self._where is not None:
            self._let_go(0.0)

    def _let_go(self, timeout: float) -> None:
        """Close the session, and the registry if it was opened here."""
        if self._session is not None:
            self._session.close(timeout=timeout)
            self._session = self._held = None
        if self._where is not None and self._registry is not None:
            self._registry.close()
            self._registry = None

    def _tell(self, trouble: str, event: str, *, level: int, **fields: object) -> None:
        """Log trouble once, until it has ended or another kind of trouble follows it."""
        if self._trouble != trouble:
            self._trouble = trouble
            self._log(event, level=level, registry=self.address or without_password(str(self._where)), **fields)

    # The file

    def _read_file(self) -> _Former | None:
        """Read the file; None if there is none, or if it was copied here from another folder."""
        with suppress(OSError, msgspec.MsgspecError, ValueError), open(self._path, "rb") as file:
            former = msgspec.json.decode(file.read(), type=prepared(_Former))
            bytes.fromhex(former.identity)
            if former.place == _place(file.fileno()):
                return former
        return None

    def _note_lease(self, registry: Registry, lease: int) -> None:
        if lease != self._lease:
            self._note(registry.address, lease, draining=self._drained)

    def _note(self, address: str, lease: int, *, draining: bool) -> None:
        made = self._path.with_suffix(".new")
        try:
            with open(made, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                os.fchmod(file.fileno(), 0o600)
                place = _place(file.fileno())
                identity = self._identity.hex()
                former = _Former(registry=address, lease=lease, identity=identity, place=place, draining=draining)
                file.write(msgspec.json.encode(former))
            made.rename(self._path)
            self._lease, self._drained = lease, draining
        except OSError as error:  # the next start then waits for the end of this lease
            self._log("the lease cannot be noted", level=logging.WARNING, reason=error.strerror or str(error))

    # The end

    def close(self) -> None:
        """Give the role up, so that the member counts as down at once. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        self._registered = False
        # A start that failed leaves no member behind that never was there.
        for_good = not self._kept or (self._joined and not self._is_ready)
        if for_good and self._held is not None:
            with suppress(RegistryError):
                self._held.commit([], [Delete(self._record_key)], timeout=_STOP_TIMEOUT_S)
        self._let_go(_STOP_TIMEOUT_S)
        if for_good:
            with suppress(OSError):
                self._path.unlink()


def _place(descriptor: int) -> str:
    state = os.fstat(descriptor)
    return f"{host_id()} {state.st_dev}:{state.st_ino}"


def _present(entry: Entry | None) -> MemberRecord | None:
    if entry is not None:
        # It is written again. If a later release of farpool wrote it, the node was taken back to this one, and still
        # drains if it did.
        with suppress(RegistryDamagedError):
            return decode(entry, MemberRecord, any_format=True)
    return None
