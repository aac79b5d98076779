# Made by scripts/native-stub (make stub) from native/bindings: change it there.
"""The native core: aligned memory, extent allocation, tier ports, the transfer queue, the pager, checksums."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, overload

import torch

class Memory:
    """Anonymous memory, aligned to 2 MiB, huge pages advised. Supports the buffer protocol (writable, format ``B``)."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __init__(self, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def touch(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Touch each page of the range, without the interpreter lock, so that the first use is not slowed by page faults."""

    def discard(self, offset: int, nbytes: int) -> None:
        """Give the pages that lie wholly inside the range back to the operating system; they read as zero afterwards."""

    def release(self) -> None:
        """Unmap the memory. The caller makes sure that it is not in use any more. Idempotent."""

def crc32c(data: object, value: int = 0) -> int:
    """CRC32C (Castagnoli) of a contiguous buffer, by hardware instructions if there are some; without the interpreter
    lock.
    """

def crc32c_many(data: list[Any]) -> list[int]:
    """CRC32C of each of several contiguous buffers, also of a single one, by two threads if there is much to do; without the
    interpreter lock.
    """

def crc32c_portable(data: object, value: int = 0) -> int:
    """CRC32C by tables, to which `crc32c` falls back on a processor without the instructions."""

class Crc32cFolding:
    """A variant of CRC32C by carry-less multiplication, for certain instructions of the processor."""

    @property
    def name(self) -> str: ...

def crc32c_foldings() -> list[Crc32cFolding]:
    """Return the foldings that this processor has instructions for, the fastest first; `crc32c` takes the first."""

def crc32c_by(folding: Crc32cFolding | None, data: object, value: int = 0) -> int:
    """CRC32C by the given folding; None for none."""

def copy_crc32c_by(folding: Crc32cFolding | None, destination: object, source: object, value: int = 0) -> int:
    """Copy a buffer; returns the CRC32C of the very bytes that the destination has then. The buffers are of one size and do not
    overlap.
    """

def buffer_address(data: object, writable: bool = False) -> int:
    """Address of the first byte of a contiguous buffer; BufferError if it must be writable and is not. The caller keeps
    the buffer alive.
    """

def memmove(destination: int, source: int, nbytes: int) -> None:
    """Copy between addresses, which may overlap; without the interpreter lock for large copies."""

def memset(address: int, value: int, nbytes: int) -> None: ...

class ExtentAllocator:
    """Allocator of ranges in ``[0, capacity)``: best fit, lowest offset among equals; deterministic. Logarithmic time.

    Sizes are rounded up to `alignment`. Used for the arena, for each tier's space and for block numbers.
    """

    def __init__(self, capacity: int, alignment: int = 1) -> None: ...
    def alloc(self, nbytes: int, tag: int = 0) -> int:
        """Take a new range; returns its offset, or -1 if no hole is large enough. The tag is the caller's and kept with the
        range.
        """

    def alloc_lowest(self, nbytes: int) -> int:
        """Take a new range first fit: returns the lowest offset at which it fits, or -1."""

    def alloc_at(self, offset: int, nbytes: int, tag: int = 0) -> bool:
        """Take exactly this range; False (and nothing taken) if any byte of it is taken or outside."""

    def free(self, offset: int) -> int:
        """Free the range that begins at `offset`; returns its (rounded) bytes. ValueError if none begins there."""

    def grow(self, capacity: int) -> None:
        """Raise the capacity."""

    def shrink(self, capacity: int) -> bool:
        """Lower the capacity; False (and nothing changed) if anything is allocated beyond it."""

    @property
    def capacity(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def largest_hole(self) -> int: ...
    def ranges(self) -> list[tuple[int, int]]:
        """The allocated ranges ``(offset, nbytes)`` in order of offset."""

    def tag(self, offset: int) -> int | None:
        """The tag of the range that begins at `offset`, None if none begins there."""

    def tags(self) -> list[int]:
        """The tags of the allocated ranges in order of offset."""

class Port:
    """The native end of a tier: blocking reads and writes that do not hold the interpreter lock."""

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Read into memory; blocks, without the interpreter lock. Raises what the tier raises."""

    def write(self, offset: int, address: int, nbytes: int) -> None: ...
    @property
    def serves_faults(self) -> bool:
        """True if the port moves any part of the written bytes, and never waits for the interpreter lock."""

class MemoryPort(Port):
    """Reads and writes a Memory."""

    def __init__(self, memory: Memory) -> None: ...

class FilePort(Port):
    """Positioned reads and writes on a file descriptor (not owned).

    With ``direct`` the descriptor was opened O_DIRECT: aligned pieces go straight to and from the caller's memory,
    through io_uring (several requests of up to 512 KiB in flight) where the kernel has it, else through pread/pwrite; unaligned
    memory and the tail of a length that is no multiple of `alignment` go through an aligned bounce buffer.
    Short reads (a truncated file) raise TierError. With ``read_only`` writes raise TierError, and so do reads once the
    file's size or time of modification has changed since construction.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        *,
        direct: bool,
        alignment: int = 4096,
        base: int = 0,
        ring: bool = True,
        read_only: bool = False,
    ) -> None: ...
    @property
    def uses_ring(self) -> bool: ...

class PythonPort(Port):
    """Port over a Python tier: calls ``tier.read_into(Extent(offset, nbytes), view)``, with the interpreter lock for that call
    only.
    """

    def __init__(self, tier: object) -> None: ...

class VerifiedPort(Port):
    """Port over another that keeps the CRC32C of each extent at its write and compares it at its read; ChecksumError names tier
    and offset.
    """

    def __init__(self, inner: Port, name: str) -> None: ...
    def forget(self, offset: int) -> None:
        """Forget the checksum of an extent that was freed."""

    @property
    def inner(self) -> Port:
        """The port below."""

    @property
    def tracked(self) -> int:
        """Number of extents with a checksum."""

class ThrottledPort(Port):
    """Port over another, slowed down to a link of these rates (bytes per second, ``inf`` for no limit) and latency (seconds).
    With `shared` both directions are on one link. The rates are above 0.
    """

    def __init__(self, inner: Port, *, read_rate: float, write_rate: float, latency: float, shared: bool) -> None: ...
    def lift(self) -> None:
        """Stop throttling, and end the transfers that are held back."""

class StripedPort(Port):
    """Port over several ports, which hold stripes of `stripe` bytes in turn and work at the same time.

    Each port has `share` bytes, a multiple of `stripe`. Without `placed` its stripes follow one another from offset 0. With
    `placed` each extent is told by `place`, and a transfer moves a whole extent; errors name the inner tier.
    """

    def __init__(self, name: str, ports: Sequence[Port], *, stripe: int, share: int, placed: bool = False) -> None: ...
    def place(self, offset: int, pieces: Sequence[int]) -> None:
        """Set the offsets, in their ports, of the pieces of the extent at `offset`."""

    def forget(self, offset: int) -> None:
        """Forget the pieces of an extent that was freed."""

class CopiesPort(Port):
    """Port over several ports that hold the same bytes. A write goes to all of them, a read to one.

    A copy that fails while another one serves is out of use, and stays so. After somebody has written all bytes to it, or to
    another port, make a new object with the present one as `before`, and the index of that copy as `fresh`.
    """

    def __init__(
        self, name: str, ports: Sequence[Port], *, before: CopiesPort | None = None, fresh: int = 0
    ) -> None: ...
    @property
    def faults(self) -> list[str]:
        """For each copy, why it is out of use; empty for one in use."""

    def take_out(self, index: int, why: str) -> bool:
        """Take a copy out of use. Returns False if it is the only one in use."""

class ReplaceablePort(Port):
    """Port over another, the inner port, which can be replaced while transfers use it.

    The inner port has `nbytes` bytes, which are copied in chunks of `chunk` bytes. To replace it, call `set_target`, then
    `copy_chunks` until it returns False, and `replace`. Until then the inner port serves all transfers, and `drop_target` gives the
    replacement up. Only one thread at a time may call these four.
    """

    def __init__(self, name: str, inner: Port, *, nbytes: int, chunk: int) -> None: ...
    def set_target(self, target: Port, *, same_bytes: bool = False) -> None:
        """Set the port that will replace the inner one. With `same_bytes` it reaches the same memory: nothing is copied."""

    def copy_chunks(self) -> bool:
        """Copy a chunk that the target lacks, and one more for each that was written since the last call. Reads them back and compares. Returns False if the target lacked nothing."""

    def replace(self, instead: Port | None = None) -> None:
        """Stop all transfers, copy what the target lacks, and put it in the place of the inner port; or put `instead` there, whose bytes include the target's."""

    def drop_target(self) -> None:
        """Give the replacement up."""

class TransferQueue:
    """Runs the transfers of a pool, between tiers and host memory or a device."""

    @property
    def pending(self) -> int:
        """Number of transfers whose end has not been reported."""

    @property
    def trouble(self) -> Exception | None:
        """The error that keeps the queue from finding out if transfers have ended; None if there is none."""

    def close(self, timeout: float) -> bool:
        """Let running transfers end, drop the rest, and join the threads. May be called again.

        Returns False if a transfer still runs after ``timeout`` seconds. The memory that it uses must then be left alone.
        """

class Completion:
    """One finished entry of the queue. `error` is None, or the exception. `start`/`end` are seconds on the monotonic clock
    (CLOCK_MONOTONIC, the one of time.monotonic) of the copying itself.
    """

    @property
    def id(self) -> int: ...
    @property
    def error(self) -> BaseException | None: ...
    @property
    def cancelled(self) -> bool: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...

class Queue(TransferQueue):
    """Ordered queue of transfers, worked off by native threads.

    Each (port, direction) is a lane with threads of its own, created when they are needed: one, or four for a file that is
    only read, or read and written directly, so that several transfers are under way. Within a lane the ready entry with the
    highest priority runs first, in order of submission among equals. An entry is ready when all entries in `after` have
    completed; ids in `after` that are unknown or completed already count as completed. If one of them failed, the entry
    completes as cancelled, and so on through its own dependents; an entry that failed or was cancelled counts as failed until
    poll() has returned it, so that the caller cannot build on a failure that it has not seen yet.
    """

    def __init__(self) -> None: ...
    def submit(
        self,
        id: int,
        port: Port | None,
        direction: int,
        pieces: Sequence[tuple[int, int, int]],
        after: Sequence[int] = (),
        priority: int = 0,
    ) -> None:
        """Enqueue. `pieces` are ``(offset in the port, memory address, nbytes)``; no piece (or port None) is a barrier that
        completes once `after` has. ValueError if `id` is pending; PoolClosedError after close or in a forked child.
        """

    def reprioritize(self, id: int, priority: int) -> None:
        """Raise or lower an entry that has not started, and (when raising) all that it waits for."""

    def poll(self) -> list[Completion]:
        """Return the entries that finished since the last call, in the order they finished. Never blocks."""

    def wait(self, timeout: float) -> bool:
        """Block (without the interpreter lock) until poll() has something to return or `timeout` seconds passed."""

    READ: int = 0

    WRITE: int = 1

class NodeServer:
    """The data loop of a node (docs/wire.md) and what it lends: segment files in a folder (docs/segment-file.md).

    Methods may be called from any thread. OSError where the system refuses a file or memory.
    """

    def __init__(
        self,
        directory: str,
        capacity: int,
        *,
        ephemeral: bool = False,
        grace: float = 10.0,
        stall: float = 30.0,
        spin: float = 5e-05,
        nvme: str = "",
        nvme_capacity: int = 0,
        shares: Mapping[int, int] = {},
    ) -> None:
        """Adopt what an earlier start left in the folder, unless `ephemeral`. `shares` are bytes guaranteed to tenants."""

    def start(self) -> None: ...
    def stop(self) -> None:
        """Close all connections and end the loop. The segments stay unless ephemeral. Idempotent."""

    def step(self, milliseconds: int) -> bool:
        """Serve the connections once, waiting at most so long for an event; return False if there was nothing to do. For a
        program that runs the loop itself, without `start`.
        """

    @staticmethod
    def simulate_time(seconds: float) -> None:
        """Set the time that all servers have in calls from this thread, in seconds above 0; 0 gives them the system's time
        again. The threads of servers that were started keep the system's time.
        """

    def adopt(
        self, fd: int | Stream, session: int, tenant: int, rights: int, key: str, *, latency: bool = False
    ) -> None:
        """Serve an authenticated stream, which belongs to the server from now on. With `latency`, small requests of the
        connection are served first. AccessDeniedError where the session is another tenant's or another access key's.
        """

    def expect_tenants(self, tenants: Set[int]) -> None:
        """Set the tenants that may come: what a tenant holds unevictable leaves room for the shares of the others."""

    def set_memory(self, tenants: Mapping[int, tuple[int, int, int]], evicts: bool = True) -> None:
        """Replace what a policy gives each tenant of the memory: guaranteed bytes (0: its share without a policy), burst (the
        most bytes that it may use; 0: no limit) and priority (borrowed bytes of the lowest are evicted first). Without `evicts`, a
        tenant above a lowered burst keeps its objects until it stores others. ValueError if a burst is below its guarantee.
        """

    def memory(self) -> dict[int, tuple[int, int, int]]:
        """Return what `set_memory` was given last."""

    def expect_keys(self, keys: Mapping[str, tuple[int, bool, int]]) -> None:
        """Set the access keys that may come: the tenant of each, True if it has a right with which it can hold something, and
        the bytes that it may hold, 0 for the node's own limit.
        """

    def set_bandwidth(self, tenants: Mapping[int, tuple[float, int, int]]) -> None:
        """Set the share, the guarantee and the cap of each tenant, from now on. A tenant that is not named has the share 1, no
        guarantee and no cap. Guarantees and caps are bytes a second, and 0 for none. ValueError if a value cannot be used;
        then nothing changes.
        """

    def bandwidth(self) -> dict[int, tuple[float, int, int]]:
        """Return what `set_bandwidth` has set."""

    def seconds_above_cap(self, tenant: int) -> float:
        """Return the seconds until a tenant is below its cap; 0 if it is."""

    def end_key(self, key: str) -> None:
        """Close all connections that were opened with this access key."""

    def connect(self, session: int, tenant: int, key: str) -> None:
        """Keep the session alive by one more connection, which the server does not serve itself. AccessDeniedError as for
        `adopt`, QuotaExceededError where the key or its tenant has too many connections.
        """

    def disconnect(self, session: int) -> None: ...
    def lend(self, session: int, tenant: int, nbytes: int) -> int:
        """Lend memory; returns the new lease's number. NodeFullError where there is no room, QuotaExceededError where the
        session or its tenant has too much.
        """

    def release(self, session: int, lease: int) -> None:
        """End a lease. KeyError if the session has no such lease."""

    def leases(self, session: int) -> list[tuple[int, int]]: ...
    def lease_path(self, session: int, lease: int) -> str:
        """Path of a lease's file; of an ephemeral node, the path that it would have. KeyError if the session has no such
        lease.
        """

    def lease_file(self, session: int, lease: int) -> int:
        """Return a descriptor of a lease's file, the caller's. KeyError if the session has no such lease."""

    def claim(
        self,
        session: int,
        tenant: int,
        *,
        lease: bytes,
        epoch: int,
        rights: int,
        seconds: float,
        extents: Sequence[tuple[int, int]],
        age: float = 0.0,
    ) -> list[tuple[int, int, int, bool]]:
        """Let the session use the extents of a verified ticket for `seconds`, and make the missing ones. `extents` are pairs of
        number and bytes; the ticket was issued `age` seconds ago. Returns number, lease at this node, bytes, and True if it was
        made, of each. Either all are claimed or none. TicketError where the epoch is late or the extents are others;
        QuotaExceededError as for `lend`; NodeFullError if the node drains; OSError where there is no room.
        """

    def order(self, lease: bytes, epoch: int, action: str, extents: Sequence[int]) -> list[int]:
        """Carry out a verified order: `action` is "end" (of these extents; of all, where there are none), "raise" or "read_only".
        Returns the numbers of the extents that it has ended. TicketError where the epoch is late.
        """

    def holdings(self) -> list[dict[str, Any]]:
        """All leases of sessions, and all extents with each claim of them. Session 0 stands for an extent that no session has
        claimed; `pool_lease` is empty for a lease of a session.
        """

    def end_holding(self, lease: int, reason: str) -> tuple[int, int]:
        """End a lease of any session, or all claims of an extent, which itself stays. Returns the bytes freed and the claims
        ended. KeyError if there is no such lease.
        """

    def objects_files(self, tenant: int, writable: bool) -> tuple[int, int]:
        """Return descriptors, the caller's, of the index, read-only, and the data, writable where that is wanted."""

    def objects_paths(self, tenant: int) -> tuple[str, str]:
        """Paths of the files of the index and the data; of an ephemeral node, the paths that they would have."""

    def objects_visited(self, session: int, tenant: int) -> int:
        """Return a descriptor, the caller's, of the session's own marks of visits, in anonymous memory. QuotaExceededError
        where too many sessions of the tenant have some, or its share has no room for more.
        """

    def expose(self, session: int, tenant: int) -> None:
        """Note that the session writes the data segment over a one-sided fabric: it may prepare places there."""

    def list_some(
        self, tenant: int, place: int, after: bytes, prefix: bytes, limit: int
    ) -> tuple[list[tuple[bytes, int, int, int, int, int, bool]], int]:
        """List objects: key, serial, bytes, milliseconds to live (0: no end), pins, copies, and True if kept, of those behind
        the key `after`: at least `limit`, or those that one turn has come to. With them the place where the walk goes on (at
        first it is 0), 0 at the end.
        """

    def changes(self, tenant: int, life: int, since: int, limit: int) -> dict[str, Any]:
        """Return at most `limit` changes of a tenant's objects from the number `since` on, as the call `changes` does
        (docs/wire.md). The first call begins the tenant's journal. QuotaExceededError if the tenant's share has no room for it.
        """

    def set_state(self, state: str) -> None:
        """Set the state that an administrator wants: "active", "draining" or "read-only"."""

    def follow_record(self, draining: bool) -> None:
        """Set whether the node's record in the registry says that it drains."""

    def state(self) -> tuple[str, str]:
        """Return the node's state, and the state that an administrator has set; the record may be stricter."""

    def pins(
        self, tenant: int | None, after: tuple[int, int, int, int], limit: int
    ) -> list[tuple[int, int, int, int, int, str, bytes, int, int | None, bool]]:
        """List at most `limit` pins of a tenant, or of all tenants, that follow `after`: tenant, session, offset of the
        payload, number, serial, name of the access key, key, bytes, milliseconds left (None: no end), and True if an
        administrator ended it.
        """

    def end_pin(
        self, pin: tuple[int, int, int, int], serial: int, reason: str
    ) -> tuple[int, int, int, int, int, str, bytes, int, int | None, bool]:
        """End the claim of a pin, and return the pin as it was before. Its memory stays until the program releases it, its
        time is over or its session ends. KeyError if there is no such pin.
        """

    def stats(self) -> dict[str, int]: ...
    def tenants(self) -> dict[int, dict[str, int]]:
        """Counters by tenant: objects, and bytes that are used, backed by memory, taken by what the system says, lent and
        guaranteed; pins, preparations, leases and connections; all evictions, evictions of damaged objects, and evictions
        for want of room in the NVMe file; puts, gets and looked up keys of connections, and sessions that map the objects and read
        them without a request; bytes moved in each direction, units of work, and microseconds for which the tenant
        had work but was above its cap.
        """

    def refusals(self) -> dict[int, dict[int, int]]:
        """Requests over data connections that were refused, by tenant and by status."""

    def latencies(self) -> dict[int, tuple[list[int], float]]:
        """Times of replies by number of the operation: counts of the buckets that end at `latency_ends`, and of longer
        times; their sum in seconds.
        """

    latency_ends: Final[list[float]] = ...
    """Ends of the buckets of `latencies`, in seconds."""

    def keys(self) -> dict[str, dict[str, int]]:
        """Counters by name of an access key that may come: its tenant, bytes held in leases, pins and unfinished publishes,
        pins, preparations, leases and connections.
        """

    def events(self) -> list[tuple[str, int, str]]:
        """Return the events since the last call: kind, session and text of each."""

class Stream:
    """A connected, non-blocking socket, plain or with TLS. Owns the descriptor. Used by one thread at a time.

    Raises OSError: PermissionError if one side does not accept the other's certificate, EPROTO if the received bytes are not valid
    TLS. After another object has taken the stream over, this one has no descriptor.
    """

    def __init__(self, fd: int) -> None: ...
    def fileno(self) -> int:
        """Return the descriptor; -1 once it was closed or taken over."""

    def handshake(self) -> int:
        """Continue the TLS handshake; returns 0 once it is complete, else the event to wait for, POLLIN or POLLOUT."""

    def receive(self, nbytes: int) -> bytes | None:
        """Receive at most `nbytes` bytes: empty at the end of the stream, None if no bytes are available now."""

    def send(self, data: bytes, begin: int = 0) -> int:
        """Send bytes from `begin` on; returns how many were sent. 0 if none can be sent now: then send the same bytes
        again.
        """

    @property
    def receiving_sends(self) -> bool:
        """True if a `receive` without result waits for room to send."""

    @property
    def peer_name(self) -> str:
        """The common name of the other side's certificate; empty without one."""

    @property
    def in_kernel(self) -> tuple[bool, bool]:
        """Two flags: True if the kernel encrypts sent bytes, and True if it decrypts received bytes."""

    def shut_down(self, *, writing: bool = False) -> None:
        """Shut down both directions, or only this side's sending; threads that wait at either end wake up."""

    def close(self) -> None: ...

class TlsContext:
    """A certificate with its private key, and the trusted authorities; all in PEM.

    Raises ValueError with the reason if they cannot be used.
    """

    def __init__(self, certificate: bytes, key: bytes, authority: bytes) -> None: ...
    def connect(self, fd: int, host: str) -> Stream:
        """Make the client's end of TLS over a connected, non-blocking socket; the node's certificate has to be of this host."""

    def accept(self, fd: int) -> Stream:
        """Make the node's end of TLS; the client has to show a certificate."""

tls_available: bool
"""True if farpool was built with OpenSSL."""

class Rows:
    """Buffers in which each row, such as one token, has a fixed number of bytes; `len` is of the rows that all of them have.

    Keeps the buffers. ValueError if there are not as many sizes as buffers, or none; BufferError if a buffer is not contiguous.
    """

    def __init__(self, memories: Sequence[Any], row_nbytes: Sequence[int]) -> None: ...
    def __len__(self) -> int: ...
    def blocks(self, start: int, count: int, size: int) -> list[Slices | None]:
        """Take `count` slices of `size` rows each that follow each other from row `start` on, which may be negative; None for
        a slice of which a row does not exist.
        """

class Slices:
    """The same rows of several buffers, one buffer after the other, as one payload."""

    @property
    def nbytes(self) -> int: ...
    @property
    def readonly(self) -> bool: ...
    def views(self) -> list[memoryview]:
        """Return them as memory of Python, one for each buffer."""

def target_sizes(targets: list[Any]) -> list[int] | None:
    """Return the bytes of each target: a memoryview, or a tuple of those and `Slices`, all writable and contiguous; None where
    one of them is something else, which `farpool.cluster.store.arguments` converts or refuses.
    """

def token_keys(
    tokens: Sequence[int], page: int, namespace: bytes, groups: int, shard: int, prior: bytes
) -> list[bytes] | None:
    """Compose the keys of all blocks of tokens, as `farpool.kv.keys` describes them, one group of layers after the other.

    `prior` is hashed before the first block's tokens.

    None if Python has to do it: tokens that are no list or tuple of whole numbers of 64 bits, or a build without OpenSSL.
    """

class Reply:
    """Answer of a node to a request. `payload` is None where there is none, or where it went into the caller's buffer; `nbytes`
    is its length in each case.
    """

    @property
    def status(self) -> int: ...
    @property
    def serial(self) -> int: ...
    @property
    def meta(self) -> bytes: ...
    @property
    def payload(self) -> bytes | None: ...
    @property
    def nbytes(self) -> int: ...

class TenantEpoch:
    """The highest epoch of a tenant that a program knows; thread-safe."""

    def __init__(self) -> None: ...
    @property
    def value(self) -> int: ...
    def meet(self, value: int) -> None:
        """Raise it to this value if that is higher."""

class Connection:
    """The client's end of an authenticated stream (docs/wire.md). Owns `fd`. Used by one thread at a time.

    Deadlines are seconds of time.monotonic(). Waits spin for `spin` seconds before they block. Raises NodeTimeoutError at
    the deadline, NodeError where the stream breaks, ProtocolError for a bad frame: the connection is then broken and of no
    more use. ChecksumError (a payload that does not match its checksum) and ValueError (a payload larger than the buffer)
    leave it usable.
    """

    def __init__(
        self,
        fd: int | Stream,
        node: str,
        *,
        tenant: int,
        credential: int,
        spin: float,
        area: bool = False,
        epoch: TenantEpoch | None = None,
    ) -> None:
        """Take a stream over. With an `epoch` each request tells it to the node, and each reply may raise it. With `area`, over
        the UNIX socket of a node on this host, large payloads are put through memory that it passes.
        """

    @property
    def broken(self) -> bool: ...
    @property
    def unanswered(self) -> int: ...
    def stale(self) -> bool:
        """Return True if an idle connection is of no more use, because the node has hung up or sent unrequested bytes."""

    def exchange(
        self,
        op: int,
        meta: bytes,
        deadline: float,
        *,
        serial: int = 0,
        lease: int = 0,
        payload: object | None = None,
        into: object | None = None,
    ) -> Reply:
        """Send a request and receive its reply."""

    def shut_down(self) -> None:
        """Make what another thread waits for on this connection fail with NodeError."""

    def close(self) -> None: ...

class AnswerTimes:
    """Times of a node's answers to small requests, and if it has been late for many answers in a row. Thread-safe."""

    def __init__(self) -> None: ...
    def add(self, seconds: float, now: float) -> None:
        """Add the time of an answer that came at `now`, by the monotonic clock."""

    @property
    def seconds(self) -> float:
        """Smoothed seconds of an answer; 0.0 before the first."""

    @property
    def last(self) -> float:
        """Seconds of the last answer."""

    def take_late(self) -> float:
        """If the node was late for many answers in a row, return the smallest smoothed time during them and begin to count again;
        otherwise return 0.0.
        """

LATE_ANSWER_S: float = 0.002

LATE_ANSWERS: int = 16

class ConnectionPool:
    """Pool of a program's connections to one node: idle ones and lent ones.

    It measures how long the node takes to answer over them.
    """

    def __init__(self) -> None: ...
    @property
    def times(self) -> AnswerTimes:
        """Times of the node's answers."""

    def on_late(self, callback: Callable[[float], object]) -> None:
        """Call this after each request for which the node has been late for many answers in a row, with `AnswerTimes.take_late()`. The
        callback must not refer to the pool, because the garbage collector does not see this reference.
        """

    def take(self) -> Connection | None:
        """Lend an idle connection; None if there is none."""

    def lend(self, connection: Connection) -> Connection:
        """Count a new connection among those that are lent."""

    def give(self, connection: Connection) -> None:
        """Take a connection back, whatever state it is in; a broken one is closed."""

    def ask(
        self, op: int, meta: bytes, serial: int, payload: object | None, into: object | None, deadline: float
    ) -> Reply | Exception | None:
        """Send one request over an idle connection and receive its reply, as `exchange`; None if no connection is
        idle.
        """

    def close(self) -> None:
        """Close the idle connections, and make waits on the lent ones fail. Idempotent."""

class ObjectReader:
    """A tenant's objects in shared memory (docs/segment-file.md). Maps the files; the descriptors stay the caller's.

    Thread-safe. ChecksumError means that an object is damaged in the node's memory: no reading it again helps. Supports the
    buffer protocol: the whole data file, read-only.
    """

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __init__(
        self,
        index_fd: int,
        data_fd: int,
        visited_fd: int,
        node: str,
        *,
        lifeline: int = -1,
        epoch: TenantEpoch | None = None,
    ) -> None:
        """Map the files. With a `lifeline`, a socket to the node, nothing is found any more once that has hung up. With an
        `epoch` nothing is found as long as the node's is a lower one; where it is higher it raises `epoch`.
        """

    def get(self, key: bytes) -> tuple[bytes, int] | None:
        """Return an object's payload and serial; None where the node has to be asked (not in memory, expired, changing right
        now).
        """

    def get_into(self, key: bytes, into: object) -> tuple[int, int] | None:
        """Read an object; its bytes and serial. ValueError if the buffer is too small; None as with `get`, and then the
        buffer's contents are unspecified.
        """

    def get_many_into(self, keys: list[bytes], into: list[Any], deadline: float) -> list[int | Exception | None]:
        """Read many objects into buffers, with a second thread where that pays: bytes of each; None where the node has to be
        asked (also for damaged ones), ValueError if its buffer is too small, NodeTimeoutError if its turn did not come before
        the deadline, by the monotonic clock. The contents of buffers of the others are unspecified.
        """

    def expect_copies(self, copies: int) -> None:
        """Leave the first object met that was put with another number of copies to the node, whose reply says so."""

    def lookup(self, keys: list[bytes], *, visit: bool = False) -> tuple[list[int | None], list[int]]:
        """Look up keys: bytes of each value, None where it is not found, and the numbers of those: they may be there, ask the
        node. With `visit` the others count as used.
        """

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a read-only view of a range of the data file, without a copy; it keeps the mapping alive."""

class RemoteEnd:
    """A lease on one node, and how it is reached: `memory` is its mapped file (header included), None where its bytes go over
    connections. `dial` returns the descriptor of a new authenticated stream, which is then the caller's.
    """

    def __init__(
        self,
        node: str,
        lease: int,
        nbytes: int,
        *,
        memory: object | None,
        dial: Callable[[], int | Stream],
        tenant: int,
        credential: int,
        spin: float,
    ) -> None: ...

class RemotePort(Port):
    """Port over memory that one node has lent.

    `timeout`: seconds that the node may take for a piece. Raises LeaseLostError, AccessDeniedError, NodeTimeoutError, NodeError,
    ChecksumError. Keeps the end alive.
    """

    def __init__(self, name: str, end: RemoteEnd, *, timeout: float) -> None: ...

WINDOW: int = 64

WINDOW_BYTES: int = 8388608

def exchange(
    asks: Sequence[tuple[Connection, int, bytes, int, object | None, object | None]], deadline: float
) -> list[Reply | Exception]:
    """Send requests to several nodes at the same time and take all replies, in the order of the requests.

    Each is a connection, operation, meta, serial, payload and buffer for the reply's payload; both may be tuples of buffers. At most `WINDOW` requests and
    `WINDOW_BYTES` of payload are under way on a connection. One payload to several nodes (the same memory) goes out chunk by
    chunk to all of them, with one checksum. In the place of a reply is the error of a connection that failed, or of a
    payload that is damaged or larger than its buffer. A connection that has not answered by the deadline is broken.
    """

def as_keys(keys: list[str | bytes]) -> list[bytes] | None:
    """Convert keys to bytes, text as UTF-8; None where one of them cannot be a key."""

def lookup_requests(keys: list[bytes], places: list[int], use: bool) -> list[tuple[bytes, list[int]]]:
    """Pack lookups for the keys at these places (docs/wire.md), into as few requests as have room, each with its places; with
    `use` each object that is found counts as used.
    """

def looked_up(meta: bytes, places: list[int], sizes: list[int | None], node: str) -> list[int]:
    """Enter a node's answer to one of `lookup_requests` into `sizes`; returns the places of keys that it does not have.

    ProtocolError if it is no answer for so many keys.
    """

class Ranking:
    """Rendezvous order of members for keys. Immutable.

    The first `takers` of the members take new objects; the others only return the objects that they have, and rank behind.

    An object is on the first `copies` members. Programs read from them in the order of their ranks, but last from the ones
    whose indexes are in `slow`.
    """

    def __init__(
        self,
        members: tuple[Any, ...],
        seeds: Sequence[int],
        weights: Sequence[float],
        takers: int,
        copies: int = 1,
        slow: Sequence[int] = (),
    ) -> None:
        """Rank members by the hash of key and seed. A member's share of the keys is proportional to its weight."""

    def first(self, key: bytes) -> Any:
        """Return the member to read from first; ValueError if there is none."""

    def order(self, key: bytes) -> list[Any]:
        """Return all members, in the order in which to read from them."""

    def places(self, key: bytes) -> list[Any]:
        """Return the members that take new objects, the highest rank for a key first."""

    def by_first(self, keys: list[bytes]) -> dict[Any, Sequence[int]]:
        """Group keys by the member to read each from first; return the numbers of its keys for each member that has some."""

class Mode(enum.IntEnum):
    """Access mode: read, change or overwrite the bytes."""

    READ = 0

    WRITE = 1
    """Reads and changes them, or changes only some."""

    OVERWRITE = 2
    """
    Writes each byte without looking at the old ones, which therefore need not be fetched.
    """

class Kind(enum.IntEnum):
    """Direction of a transfer."""

    FETCH = 0

    WRITE_BACK = 1

class State(enum.IntEnum):
    """State of a block: absent, in the arena, or on its way."""

    FREE = 0
    """The number is not in use."""

    ABSENT = 1

    FETCHING = 2

    RESIDENT = 3

    WRITING_BACK = 4
    """
    Leaving: its arena range may already be promised to another block, which waits for the write.
    """

class Run:
    """Consecutive blocks of one storage, wanted contiguous in the arena."""

    def __init__(self, first: int, count: int, mode: Mode, table: int = -1) -> None: ...
    @property
    def first(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def mode(self) -> Mode: ...
    @property
    def table(self) -> int:
        """First block of the table, for a run of rows that are picked by data; -1 for any other.

        Such an access says nothing about the rows of the next pass, so the tape only notes the table.
        """

    def __eq__(self, arg: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...

class PagerCounters:
    """Counters of a pager's work so far."""

    @property
    def accesses(self) -> int:
        """Runs accessed."""

    @property
    def hits(self) -> int:
        """Runs found whole and in place."""

    @property
    def row_accesses(self) -> int:
        """Accesses to blocks of tables whose rows are picked by data."""

    @property
    def row_hits(self) -> int:
        """Accesses among `row_accesses` that found their block in place."""

    @property
    def late(self) -> int:
        """Runs whose transfer was under way when they were accessed."""

    @property
    def demand_fetches(self) -> int: ...
    @property
    def prefetches(self) -> int: ...
    @property
    def prefetches_used(self) -> int: ...
    @property
    def prefetches_wasted(self) -> int:
        """Blocks prefetched that left, or were overwritten, before they were accessed."""

    @property
    def evictions(self) -> int: ...
    @property
    def write_backs(self) -> int: ...
    @property
    def moves(self) -> int: ...
    @property
    def moved_bytes(self) -> int: ...

class Block:
    """A copy of one row of a pager's table of blocks."""

    @property
    def size(self) -> int: ...
    @property
    def place(self) -> int:
        """Offset in the arena; -1 unless fetching, resident or writing back."""

    @property
    def copy(self) -> int:
        """Offset of the copy in its tier, valid while the block is not dirty."""

    @property
    def next_use(self) -> int:
        """Key for eviction: the block with the highest key is evicted first."""

    @property
    def last_use(self) -> int:
        """Position on the tape of the latest access."""

    @property
    def pins(self) -> int: ...
    @property
    def name(self) -> int:
        """Name of the block on the tape: its ordinal of birth among the blocks that live."""

    @property
    def tier(self) -> int:
        """Tier of the copy below; -1 without one."""

    @property
    def state(self) -> State: ...
    @property
    def dirty(self) -> bool: ...
    @property
    def prefetched(self) -> bool:
        """True if it was fetched ahead and has not been accessed since."""

class PagerAccess:
    """One operation's request for its operands, and the pager's answer."""

    @property
    def granted(self) -> bool: ...
    @property
    def ordinal(self) -> int:
        """Place of the access in the order of requests; rows of one table may share it."""

    @property
    def last_use(self) -> int:
        """Ordinal of the last access that may have used the ranges that were claimed for this one; -1 for none."""

    @property
    def places(self) -> tuple[int, ...]:
        """Arena offset of each run; valid while granted."""

    @property
    def runs(self) -> tuple[Run, ...]: ...
    @property
    def error(self) -> BaseException | None:
        """Error for which it will not be granted, with nothing pinned; None without one."""

    def waits_for(self, block: int) -> bool:
        """Return True if it waits for the block, or waited for it before it was granted."""

class Pager:
    """Decides which block is where, and when it moves. Deterministic: no clock, no file, no thread.

    The caller passes what `take_commands` returns to a queue, in order, and reports each transfer's end with
    `completed` or `failed`, then calls `proceed`. It holds one lock around the pager.

    Parameters
    ----------
    capacity : int
        Bytes of the arena.
    spaces : sequence of Space or None
        The lower tiers from fast to slow; None stands for a read-only source, which blocks only come from.
    classes : tuple of str
        Names that a block's class may have.
    alignment : int
        Of blocks in the arena, in bytes; each block of a storage but the last must be a multiple of it.
    history : int
        Accesses that the tape remembers; a loop longer than this is not predicted.
    prefetch : bool
        True to fetch along the tape ahead of the accesses.
    late : bool
        True if the program computes on a device, whose times are reported later, by `ran`.
    """

    def __init__(
        self,
        capacity: int,
        spaces: Sequence[Any],
        classes: tuple[str, ...] = ("bytes",),
        *,
        alignment: int = 64,
        history: int = 262144,
        prefetch: bool = True,
        late: bool = False,
    ) -> None: ...
    def add_source(self) -> int:
        """Make known another read-only source; returns its index among the tiers."""

    def create(self, sizes: Sequence[int], cls: str = "bytes") -> int:
        """Make consecutive blocks of these sizes in bytes. They have no content until they are written."""

    def adopt(self, block: int, source: int, offset: int, place: int, nbytes: int) -> None:
        """Note that a source has a part of this absent block's clean copy; `place` is relative to the block."""

    def note_copy(self, block: int, tier: int, offset: int) -> None:
        """Note that a tier has the bytes of this absent block, which has no content yet, at an offset that was reserved there."""

    def can_adopt(self, block: int) -> bool:
        """Return True if the block is absent and its content, if any, is a source's."""

    def retire(self, first: int, count: int) -> None:
        """Note that the program has dropped the blocks of one `create`; then call `forget` until it returns True."""

    def forget(self, first: int, count: int) -> bool:
        """Free retired blocks; False (and nothing done) while they are moved, pinned or waited for."""

    def request(self, runs: Iterable[Run], now: float = 0.0) -> PagerAccess:
        """Request runs, which must not overlap. They are granted at once or later.

        Parameters
        ----------
        now : float
            Seconds on a clock that does not go back. Unless times are reported late, the time between a grant and the next
            request counts as the program's computing; without computing nothing is prefetched, because that would gain
            nothing.

        Raises
        ------
        TooLargeError
            They do not fit into the arena together; nothing was changed.
        """

    def release(self, access: PagerAccess, *, go_on: bool = True) -> None:
        """End an access, whose operation is done. Without `go_on` no other access is served and nothing changes its place."""

    def ran(self, ordinal: int, start: float, end: float) -> None:
        """Report when a device computed what an access was for: from `start` to `end`, on the clock of `request`.

        For a pager whose times come late, in the order of the ends.

        Parameters
        ----------
        ordinal : int
            Of the access.

        Raises
        ------
        ValueError
            There was no such access, it ends before it begins, or times are not reported late.
        """

    @property
    def late(self) -> bool:
        """True if the program computes on a device, whose times `ran` reports."""

    def abandon(self, access: PagerAccess) -> None:
        """Withdraw a waiting access, or release it if it has been granted. Transfers under way continue."""

    def take_commands(self) -> list[Any]:
        """Return the commands to start now, in this order; a move must be made before the next command is started."""

    def take_raised(self) -> list[int]:
        """Return the ids of transfers started as prefetches for which an access waits now."""

    def completed(self, transfer: int, start: float = 0.0, end: float = 0.0) -> None:
        """Report that a transfer has ended well; it was on its link from `start` to `end`, on the clock of `request`."""

    def failed(self, transfer: int, error: BaseException) -> None:
        """Report that a transfer has failed. Transfers ordered after it are undone; do not report their ends."""

    def proceed(self, now: float = 0.0) -> None:
        """Grant the accesses that can be granted now, after completions were reported."""

    def resize(self, capacity: int) -> bool:
        """Change the arena's bytes. False while blocks still occupy bytes beyond; then call again after completions.

        Raises
        ------
        NoRoomError
            No lower tier takes a block that has to be evicted; the capacity is as it was. Or the error of the tier that refused it.
        """

    def demote(self, first: int, count: int) -> bool:
        """Evict consecutive blocks before their turn; False if some stay, because they are in use or no tier has room."""

    def block(self, block: int) -> Block:
        """Return the present state of one block."""

    def class_of(self, block: int) -> str: ...
    def blocks(self) -> list[int]:
        """Blocks in use, in order."""

    def resident(self) -> list[int]:
        """Blocks that own a range of the arena, in order of place."""

    def place_of(self, run: Run) -> int:
        """Arena offset of a run that is resident and contiguous, else -1."""

    def run_bytes(self, run: Run) -> int:
        """Arena bytes that a run occupies."""

    def transfer(self, id: int) -> Any:
        """The transfer with this id, if it is under way."""

    def transfers(self) -> list[Any]:
        """The transfers under way, in the order in which they were started."""

    def evict_for_test(self, block: int) -> bool:
        """Evict a resident block although its room is not needed, even a pinned one; False if no tier takes it."""

    @property
    def under_way(self) -> int:
        """Number of transfers under way."""

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""

    @property
    def used(self) -> int:
        """Bytes of the arena that blocks own."""

    def rounded(self, nbytes: int) -> int:
        """Arena bytes that a block of `nbytes` bytes takes."""

    @property
    def ahead_bytes(self) -> int:
        """Bytes prefetched, or on their way, that have not been accessed yet."""

    @property
    def tape_bytes(self) -> int:
        """Bytes of memory that the tape holds."""

    @property
    def table_bytes(self) -> int:
        """Bytes of memory that the pager holds to know its blocks, in addition to the tape."""

    @property
    def divergences(self) -> int:
        """Number of times that the program did something else than the tape predicted."""

    @property
    def rows_by_frequency(self) -> bool:
        """True if rows of tables are kept by how often they are used, False if by how recently."""

    @property
    def row_counts(self) -> dict[int, tuple[int, int]]:
        """Accesses to blocks of each table whose rows are picked by data, and hits, by the table's first block."""

    @property
    def counters(self) -> PagerCounters: ...

class SimulatedProgram:
    """A pager under a program on simulated hardware, to measure the pager.

    One tier behind a link in virtual time, no bytes. Made of a number of ``blocks`` and a ``history``, the number of accesses
    that the tape remembers, it computes on the host, and a quarter of the blocks are in the arena.
    """

    @overload
    def __init__(self, blocks: int, history: int) -> None: ...
    @overload
    def __init__(
        self,
        *,
        capacity: int,
        storages: Sequence[int],
        block_bytes: int,
        history: int,
        seconds_per_byte: float,
        access_seconds: float,
        transfer_seconds: float,
    ) -> None:
        """Make a program whose thread runs ahead of a device, on which it computes.

        The arena has ``capacity`` bytes, and each storage so many blocks of ``block_bytes``. A byte takes ``seconds_per_byte`` on
        the link, each way, and the thread needs the other seconds for each access and for each transfer that it starts.
        """

    def access(self, runs: Sequence[Run], seconds: float) -> None:
        """Make an access, for which the device computes this long."""

    @property
    def finished(self) -> float:
        """Virtual time at which everything begun so far has ended."""

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes fetched and written back so far."""

    def fill(self) -> None:
        """Write each block."""

    def loop(self, accesses: int) -> None:
        """Read this many blocks one after the other in a loop, from the place where the last call stopped."""

    def shuffled(self, accesses: int) -> None:
        """Read this many blocks picked at random."""

class Layout:
    """Position of a storage in its blocks."""

    def __init__(self, first: int, count: int, offset: int, block_bytes: int, nbytes: int, shared: bool) -> None: ...
    @property
    def first(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shared(self) -> bool: ...
    @property
    def loose(self) -> bool: ...
    @loose.setter
    def loose(self, arg: bool, /) -> None: ...
    def swap(self, other: Layout) -> None:
        """Exchange two storages' places."""

class Use:
    """Bytes ``[start, stop)`` of a storage, and the mode of access to them. Immutable, so it may be used again."""

    def __init__(self, storage: Any, start: int, stop: int, mode: Mode) -> None: ...
    @property
    def storage(self) -> Any: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def mode(self) -> Mode: ...

def runs_of(uses: Iterable[Use], *, rows: bool = False) -> tuple[list[Run], list[tuple[int, int]]]:
    """Runs of blocks that cover the uses, and for each use its run and its offset in that run, in bytes.

    Uses that share blocks share a run, so that aliases stay aliases. An empty use has run -1.

    Parameters
    ----------
    rows : bool
        The uses are rows picked by data.
    """

class Grant:
    """Operands in the arena, pinned until they are released."""

    def __init__(self, offsets: tuple[int, ...], access: PagerAccess | None, waited: float = 0.0) -> None: ...
    @property
    def note(self) -> object:
        """Free for a note of the grant's owner; None at first."""

    @note.setter
    def note(self, arg: object, /) -> None: ...
    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each use's first byte, in bytes from the arena's start."""

    @property
    def waited(self) -> float:
        """Seconds that the call waited for the operands; 0 if they were resident."""

    @property
    def access(self) -> PagerAccess | None:
        """The pager's access behind the grant; None if all uses are empty."""

class Driver:
    """A pager, the queue that runs its transfers, and the pool's lock around them.

    A pool asks its driver for the operands of an operation. The driver returns their places in the arena, after waiting for the
    transfers that bring them in. ``with driver:`` holds the lock. Callers of all methods except `acquire` and `release` hold it.

    Parameters
    ----------
    queue : TransferQueue
        Runs the transfers, between host memory or a device and the tiers.
    address : int
        Where the arena begins in memory.
    ports : list of Port
        The tiers' native ends, indexed as the pager indexes tiers; may grow.
    timeout : float
        Seconds that an access waits for its operands.
    waited : callable
        Called without the lock after each wait with ``(op, start, seconds, block, tier)``: operation `op` waited `seconds` from
        time `start` on for the transfer of `block` from or to `tier`. If the wait was given up, `seconds` is negative, and the
        call raises the error. `block` and `tier` are -1 if `op` waited because other threads held its operands.
    watch : Watch, optional
        Debug mode's observer (`farpool.memory.debug.Watch`). Called under the lock: ``starting(commands)`` before commands are
        started, ``moved(move)`` after each move among them, ``ended(transfer, failed)`` before the pager learns of the end of a
        transfer, ``granted(access, uses, op)`` when operands are pinned, ``released(access)`` before the pager learns of a release,
        and ``raise_findings()`` when the release is complete. If ``starting`` raises, none of the commands is started; if
        ``granted`` raises, the access is given up.
    stream : callable, optional
        Returns the device's stream on which the calling thread queues work now. None if operations compute on the host.
    """

    def __init__(
        self,
        pager: Pager,
        queue: TransferQueue,
        address: int,
        ports: list[Port],
        timeout: float,
        waited: Callable[[str, float, float, int, int], None],
        watch: Any = None,
        stream: Callable[[], int] | None = None,
    ) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def wait(self, timeout: float) -> None:
        """Release the lock, wait at most `timeout` seconds until another thread changes something, and lock again."""

    def notify_all(self) -> None:
        """Wake the waiting threads, so that they check again if they can continue."""

    def acquire(self, uses: Sequence[Use], op: str, rows: bool, careful: bool) -> Grant | None:
        """Bring operands into the arena and pin them. Called without the lock.

        Parameters
        ----------
        rows : bool
            The uses are rows picked by data.
        careful : bool
            True if the caller has done the work that `attention` asks for, and has packed the storages. If this is False and any of
            this is still to be done, the call does nothing and returns None. It also does so if the driver is closed.

        Raises
        ------
        TooLargeError
            The operands do not fit into the arena together.
        NoRoomError, TransferFailedError
            The operands cannot be brought in.
        """

    def release(self, grant: Grant) -> None:
        """Unpin the operands of an operation; called without the lock."""

    def start(self) -> None:
        """Start the moves and transfers that the pager has queued."""

    def move(self, source: int, target: int, nbytes: int) -> None:
        """Copy bytes inside the arena, between ranges that an access holds; on a device, after all accesses so far."""

    def note_ends(self) -> bool:
        """Report ended transfers to the pager; return False if no transfer has ended."""

    def close(self) -> None:
        """Close the driver: it grants no more accesses, and waiting threads give up."""

    @property
    def attention(self) -> bool:
        """If True, a call of `acquire` without `careful` returns None. Its caller then frees dropped storages, prepares to
        record or check the access if that is wanted, and calls `acquire` with `careful`.
        """

    @attention.setter
    def attention(self, arg: bool, /) -> None: ...
    @property
    def granted(self) -> int:
        """Number of accesses that have not been released."""

    @property
    def peak(self) -> int:
        """The most bytes of the arena that were ever in use at the same time."""

    def listen(self, wanted: bool) -> None:
        """Start or stop collecting what `take_ended` and `take_ran` return."""

    def take_ended(self) -> list[tuple[Any, float, float, int]]:
        """Return the transfers that have succeeded since the last call: each transfer, the times of its start and end, and
        the bytes of the arena in use at its end.
        """

    def take_ran(self) -> list[tuple[int, float, float]]:
        """Return when a device computed, as far as it has told since the last call: an access's ordinal, start and end."""

    def device_times(self) -> tuple[float, float, float, float, float]:
        """Return what a device did, in seconds: the whole time from its first work to its last, and of that the time in which
        it computed, in which it did not because an operation waited for bytes, in which bytes were fetched, and in which bytes were
        written back. All 0 if operations compute on the host.
        """

    def forget_parent(self) -> None:
        """Close the driver in the child of a fork, and replace the lock, which a thread of the parent may hold."""

    def links(self) -> list[tuple[int, Kind, int, int, float]]:
        """Return, for each tier and direction, the tuple (tier, direction, number of transfers, bytes, seconds)."""

class Footprint:
    """Geometry of a tensor over a storage; see `farpool.tensors.footprint`."""

    def __init__(
        self,
        storage: Any,
        arena: Any,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
        *,
        conj: bool = False,
        neg: bool = False,
    ) -> None: ...
    @property
    def storage(self) -> Any: ...
    @property
    def arena(self) -> Any: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def size(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def conj(self) -> bool: ...
    @property
    def neg(self) -> bool: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def views(self) -> dict[Any, Any]: ...
    def reader(self) -> Use:
        """Return the use that reads its bytes."""

    def writer(self) -> Use:
        """Return the use that writes its bytes."""

    def kept_real(self, place: int, requires_grad: bool) -> torch.Tensor | None:
        """Return the real tensor that was kept, if it is at `place` in the arena."""

    def keep_real(self, place: int, requires_grad: bool, real: torch.Tensor) -> None:
        """Keep a real tensor, to be used again."""

    def check_real(self, real: torch.Tensor) -> None:
        """Drop a real tensor that was kept if an operation has changed its geometry."""

    def forget_real(self) -> None:
        """Drop the real tensor that was kept, so that the next use makes a new one."""

class Calls:
    """Runs operations on paged tensors that need no Python; see `farpool.tensors.calls`."""

    def __init__(self) -> None: ...

    class Kind(enum.IntEnum):
        """Kind of an operator, by which it is run."""

        COMPUTE = 0
        """Runs on real tensors."""

        VIEW = 1
        """
        Views a part of its first argument, which the other arguments give; none of these is a tensor.
        """

        ALIAS = 2
        """Another tensor over the same bytes."""

        COMPOSED = 3
        """Composed of other operators, which are dispatched in its place."""

        COMPOSED_OF_VIEWS = 4
        """
        Composed of other operators, and torch itself marks the result as a view.
        """

    def bind(self, torch: object, paged: type, footprint: type, hooks: object) -> None:
        """Set the types of tensors and footprints, and the Python functions for all other cases."""

    def learn(
        self,
        operation: object,
        call: object,
        name: str,
        kind: Calls.Kind,
        *,
        writes: int = 0,
        retried: bool = False,
        ruled: bool = False,
        strided: bool = False,
    ) -> None:
        """Take over an operator: run it without Python from now on.

        Parameters
        ----------
        call : callable
            Calls the operator's kernels.
        writes : int
            Bits of the positions of arguments that it changes.
        retried : bool
            Leave it to Python if its operands do not fit into the fast tier together.
        ruled : bool
            Leave it to Python, which may ask for it by `compute`.
        strided : bool
            Leave it to Python if an argument is a tensor of another layout.
        """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation of which at least one argument is paged."""

    def compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation on real tensors; NotImplemented if Python has to do it."""

    def copy_rows(
        self, table: Footprint, op: str, indices: int, count: int, memory: int, groups: int, write: bool
    ) -> bool:
        """Copy rows of a table, whose elements are contiguous, to or from plain memory, block by block.

        Parameters
        ----------
        indices : int
            Address of `count` row numbers of 64 bits; distinct if rows are written.
        memory : int
            Address of the same number of rows.
        groups : int
            Acquire blocks of at most one part in this many of the budget together.
        write : bool
            Copy into the table.

        Returns
        -------
        bool
            False, with nothing done, if Python has to do it: a number out of range, rows with gaps, debug mode, a device.
        """

    def page_gradient(self, leaf: torch.Tensor, op: str, copy: Callable[[Any, torch.Tensor, str], object]) -> bool:
        """Replace the plain gradient of a leaf by a paged copy.

        Parameters
        ----------
        copy : callable
            Copies one that spans blocks: paged tensor, gradient, operation.

        Returns
        -------
        bool
            False if Python has to do it; then nothing was done.
        """

    def stretches(self, lists: list[Sequence[Any]], count: int, share: int, pinned: int) -> list[slice]:
        """Cut lists of `count` items into stretches.

        The tensors of one take at most one of `share` parts of the budget, and the blocks in which they lie at most one
        of `pinned` parts; or it has one item of each list.
        """

    def wrap(self, footprint: Footprint, requires_grad: bool) -> torch.Tensor:
        """Return a paged tensor over the bytes of a footprint."""

    def suspend(self) -> None:
        """Leave all operations to Python from now on."""

class Device:
    """A device with memory of its own, which runs copies on streams."""

class Cuda(Device):
    """A CUDA device, through its driver. It uses the context that torch uses, too.

    Parameters
    ----------
    index : int
        Number of the device, as this process counts them.
    library : str
        The driver's library.

    Raises
    ------
    TierError
        There is no driver, it is too old, or it has no such device.
    """

    def __init__(self, index: int = 0, library: str = "libcuda.so.1") -> None: ...

class SpaceLocks:
    """The memory of a tier, and its bytes that are page-locked."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def locked(self) -> int:
        """Bytes from the start of the memory that are page-locked."""

    @property
    def refused(self) -> str:
        """Why the rest will not be locked; empty as long as nothing was refused."""

class PageLocks:
    """Page-locks the memory of tiers for a device, in a native thread of its own.

    The thread locks chunks of ``chunk`` bytes, a multiple of the page size, from the start of each tier's memory up to the
    last byte that a transfer has asked for. It refuses a chunk that would raise what all objects of this process have
    locked above ``most`` bytes. What a device or this limit has refused is not tried again.
    """

    def __init__(self, device: Device, chunk: int, most: int) -> None: ...
    def add(self, port: Port, address: int, nbytes: int, name: str) -> None:
        """Declare that the offsets of a port are ``nbytes`` bytes of memory from this address on, a page boundary.

        The port must do nothing but copy these bytes, and the memory must stay mapped until `close` has returned True.
        Raises ValueError if the range cannot be locked, and PoolClosedError after `close`.
        """

    def parts(self, port: Port, offset: int, nbytes: int) -> list[tuple[int, int]] | None:
        """Return address and bytes of the parts of a range of a port, each inside one locked chunk.

        If any byte of the range is not locked yet, this returns None and asks the thread to lock the memory up to the last of
        them. It also returns None for a port that was not added.
        """

    def close(self, timeout: float) -> bool:
        """Stop the thread and unlock everything; no copy may be under way.

        Returns False, and unlocks nothing, if the device still locks a chunk after ``timeout`` seconds.
        """

    def totals(self) -> list[SpaceLocks]:
        """Return what is locked of each memory, in the order in which they were added."""

    @staticmethod
    def locked_in_process() -> int:
        """Bytes that all objects of this process have locked."""

class DeviceQueue(TransferQueue):
    """Runs transfers between tiers and the memory of a CUDA device, on streams.

    Parameters
    ----------
    cuda : Cuda
        The device.
    staging : int
        Bytes of page-locked host memory for transfers whose tier is not page-locked.
    allocating : int
        The stream on which the arena was allocated. Earlier work on it may still use the same memory.
    locks : PageLocks, optional
        What is page-locked of the tiers' memory. The queue unlocks everything at `close`.

    Raises
    ------
    TierError
        The device refuses the memory or the streams.
    """

    def __init__(self, cuda: Cuda, staging: int, allocating: int = 0, locks: PageLocks | None = None) -> None: ...
    def fill(self, address: int, nbytes: int, value: int) -> None:
        """Fill device memory with a value of two bytes, after the program's earlier work and before its later work.

        The address and the number of bytes must be even.
        """

    @property
    def chunk(self) -> int:
        """Bytes of the pieces, from its start, in which a block that is not page-locked is written and read."""

    @property
    def bounce(self) -> int:
        """Bytes of device memory that the queue holds for moves between ranges that overlap; 0 after a successful `close`."""

    def streams(self) -> list[int]:
        """All streams whose queued work may use the arena; after a successful `close` the program's streams."""

def policy_names() -> tuple[str, ...]:
    """Names of all policies, in the order in which tables show them."""

class Policy:
    """Chooses which object of a cache makes room for the next one. The caller keeps the objects and counts the bytes.

    Objects have slots (small numbers, given by the caller) and keys. After a miss: `victim` and `remove` while there is no
    room, then `insert`. Deterministic. ValueError for a slot that is not in, or is in already; nothing has changed then.
    """

    def __init__(self, name: str, capacity: int) -> None:
        """Make the policy with this name, one of `policy_names` or ``node``, for a cache of this capacity."""

    def touch(self, slot: int, next_use: int = 9223372036854775807) -> None:
        """Note that the object is used again; `next_use` is the time of its next use, for ``belady``."""

    def insert(
        self, slot: int, key: int, size: int = 1, next_use: int = 9223372036854775807, cost: float = 1.0
    ) -> None:
        """Note that the object was inserted; `cost` of fetching it, for ``gdsf`` and ``node``."""

    def victim(self, key: int, size: int = 1, in_use: set[int] = set()) -> int:
        """Return the slot to evict next so that `key` can come in, none of `in_use`; it stays in. IndexError if none may go."""

    def remove(self, slot: int, *, evicted: bool) -> None:
        """Note that the object has left: evicted, so that it may be remembered, or deleted."""

    def __contains__(self, arg: int, /) -> bool: ...
    def __len__(self) -> int: ...

class RequestTrace:
    """Requests for objects, in order, with sizes and next uses. Requests of 0 bytes are left out and counted."""

    def __init__(self, ids: Sequence[int], sizes: Sequence[int]) -> None: ...
    @staticmethod
    def oracle_general(data: object) -> RequestTrace:
        """Read libCacheSim's oracleGeneral format: records of 24 bytes. ValueError, with the record's number, if the bytes
        cannot be that.
        """

    @staticmethod
    def csv(data: object) -> RequestTrace:
        """Read lines of ``time,object,size``, or of columns that a header names. ValueError, with the line's number, for
        anything else.
        """

    def __len__(self) -> int: ...
    @property
    def left_out(self) -> int:
        """Requests of 0 bytes."""

    def objects(self) -> int:
        """Number of different objects."""

    def footprint(self) -> int:
        """Bytes of all different objects."""

class CacheSimulation:
    """A cache under a policy that serves the requests of a trace. It counts all runs so far."""

    def __init__(self, policy: str, capacity: int) -> None: ...
    def run(self, trace: RequestTrace, first: int, last: int) -> None:
        """Serve the requests from `first` to before `last`, without the interpreter lock."""

    @property
    def requests(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def bytes_missed(self) -> int: ...

def online_policy_names() -> tuple[str, ...]:
    """Return the names of the policies among which `PrefixEviction` chooses; it begins with the first."""

class TenantCounts:
    """Use of a cache by one tenant: its blocks, hits with the costs that they saved, insertions and evictions."""

    @property
    def blocks(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def hit_nbytes(self) -> int: ...
    @property
    def saved(self) -> float: ...
    @property
    def inserted(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def evicted(self) -> int: ...

class PrefixEviction:
    """Chooses the blocks of prefixes that leave a cache, and the policy to choose by. Deterministic; moves no bytes."""

    def __init__(self, capacity: int, policy: str = "") -> None:
        """Make it for a cache of that many bytes; with a policy's name, that one is used and no shadows are run."""

    def insert(self, id: int, parent: int, size: int, cost: float, tenant: int = 0) -> tuple[bool, list[int]]:
        """Bring a block in; return True if it was admitted, and the ids that had to leave. `parent` is 0 for the first."""

    def touch(self, id: int) -> bool:
        """Note a hit; False if the block is not in."""

    def remove(self, id: int) -> bool:
        """Take a block out; False if it is not in."""

    def pin(self, id: int) -> bool:
        """Hold a block and those before it; False if it is not in."""

    def unpin(self, id: int) -> bool:
        """Take one pin away; False if the block is not in."""

    def __contains__(self, arg: int, /) -> bool: ...
    def __len__(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def policy(self) -> str: ...
    @property
    def switches(self) -> int: ...
    @property
    def sampled(self) -> int:
        """One block in so many is in the sample of the shadows."""

    def use_policy(self, name: str) -> None:
        """Go on with another policy and the blocks as they are."""

    def tenants(self) -> list[TenantCounts]: ...
    def shadows(self) -> list[tuple[str, int, float]]:
        """Return the policy, hits and saved seconds of each shadow cache."""

class RegionMemory:
    """Memory whose pages are in lower tiers while the program does not use them. Supports the buffer protocol (writable,
    format ``B``). Pages have 4096 bytes.
    """

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __init__(
        self, name: str, *, most: int, budget: int, longest: int, workers: int, timeout: float, policy: str = "sieve"
    ) -> None: ...
    def grow(self, nbytes: int, places: Sequence[tuple[Port, int, int, str, bool]]) -> None:
        """Grow to `nbytes` bytes. Each place is room below: port, offset, pages, name of the tier, if its bytes are verified."""

    def shrink(self, nbytes: int) -> int:
        """Shrink to `nbytes` bytes; return the number of pages for which there is still room below."""

    def save(self, first: int, count: int) -> None:
        """Return when all bytes written before the call are below."""

    def set_reading(self, first: int, count: int, advice: int) -> None:
        """Set how the program reads pages: 0 normally, 1 on and on, 2 at random."""

    def will_need(self, first: int, count: int) -> None: ...
    def dont_need(self, first: int, count: int) -> None: ...
    def pin(self, first: int, count: int) -> bool:
        """Load pages and keep them; return False if more than half of the budget would be pinned."""

    def unpin(self, first: int, count: int) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def unmap(self) -> None:
        """Unmap the memory. BufferError if it is in use."""

    @property
    def uses(self) -> int:
        """Number of buffers that programs hold, and of calls that run."""

    @property
    def is_open(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
