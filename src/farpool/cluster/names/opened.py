"""One version of a name that is being read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from farpool.abc.objects import ObjectStore
from farpool.cluster.names.manifest import Manifest, Piece, TensorEntry, decode_manifest
from farpool.cluster.names.records import NameInfo
from farpool.errors import ConfigError, NameLostError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["OpenedName"]

_BATCH = 4 << 20


class OpenedName:
    """One version of a name, whose objects stay until it is closed; a context manager.

    Attributes
    ----------
    info : NameInfo
        The version that is open.
    held : bool
        True if the registry has recorded this reader. False if the registry was away, or could not be written: then
        the version is the last known one, or the current one, and stays for as long as other programs hold it.
    """

    def __init__(
        self,
        store: ObjectStore,
        info: NameInfo,
        manifest: str,
        release: Callable[[], None] | None,
        defer: Callable[[Callable[[], object]], None],
    ) -> None:
        self.info = info
        self.held = release is not None
        self._store = store
        self._release = release
        self._defer = defer
        self._what = f"the name {info.name!r} in version {info.version}"
        try:
            content = store.get(manifest)
            if content is None:
                raise self.lost(manifest)
            self._manifest = decode_manifest(content, self._what)
        except BaseException:
            self.close()
            raise

    @property
    def manifest(self) -> Manifest:
        """Manifest of the version: the objects of which it consists."""
        return self._manifest

    def read(self) -> bytes:
        """Read the whole value.

        Raises
        ------
        NameLostError
            An object of it is on no node any more.
        ConfigError
            The name holds tensors.
        """
        pieces = self._pieces()
        if len(pieces) == 1:
            content = self._store.get(pieces[0].key)
            if content is None:
                raise self.lost(pieces[0].key)
            return content
        value = bytearray(self.info.nbytes)
        self.read_into(value)
        return bytes(value)

    def read_into(self, buffer: Buffer) -> int:
        """Read the value into a buffer of at least its size; return its size in bytes. Raises the errors of `read`."""
        target = memoryview(buffer).cast("B")
        total = sum(piece.nbytes for piece in self._pieces())
        if target.nbytes < total:
            raise ValueError(f"the buffer has {target.nbytes} bytes, {self._what} has {total}")
        offset = 0
        for piece in self._pieces():
            self._fetch([(piece.key, target[offset : offset + piece.nbytes])])
            offset += piece.nbytes
        return offset

    def parts(self) -> Iterator[bytes]:
        """Iterate over pieces of the value, so that a large one is never in memory as a whole. Errors as of `read`."""
        for piece in self._pieces():
            content = self._store.get(piece.key)
            if content is None:
                raise self.lost(piece.key)
            yield content

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Return the name, type and shape of each tensor.

        Raises
        ------
        ConfigError
            The name holds a value.
        """
        if self._manifest.tensors is None:
            raise ConfigError(f"{self._what} holds a value and no tensors; read() gives it", setting="name")
        return self._manifest.tensors

    def read_tensor_into(self, entry: TensorEntry, buffer: Buffer) -> None:
        """Read a tensor's elements into a buffer of exactly its bytes. Errors as of `read`."""
        self.read_tensors_into([(entry, buffer)])

    def read_tensors_into(self, pairs: Iterable[tuple[TensorEntry, Buffer]]) -> None:
        """Read tensors' elements into buffers of exactly their bytes, small ones together. Errors as of `read`."""
        wanted: list[tuple[str, memoryview]] = []
        nbytes = 0
        for entry, buffer in pairs:
            target = memoryview(buffer)
            if target.nbytes != entry.nbytes:
                raise ValueError(f"the buffer has {target.nbytes} bytes, the tensor {entry.name!r} has {entry.nbytes}")
            if entry.nbytes:
                wanted.append((entry.key, target))
                nbytes += entry.nbytes
            if nbytes >= _BATCH:  # each batch has the time of one call
                self._fetch(wanted)
                wanted, nbytes = [], 0
        self._fetch(wanted)

    def defer(self, call: Callable[[], object]) -> None:
        """Call a function a little later, by another thread or in a later call.

        For finalizers, such as one that closes this: they may run while this thread holds a lock.
        """
        self._defer(call)

    def close(self) -> None:
        """Release the version. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def _pieces(self) -> tuple[Piece, ...]:
        if self._manifest.tensors is not None:
            raise ConfigError(f"{self._what} holds tensors and no value; tensors() names them", setting="name")
        return self._manifest.pieces

    def _fetch(self, wanted: Sequence[tuple[str, memoryview]]) -> None:
        for (key, target), nbytes in zip(wanted, self._store.get_into_many(wanted), strict=True):
            if nbytes is None:
                raise self.lost(key)
            if nbytes != target.nbytes:
                raise ConfigError(
                    f"{self._what} has an object of {nbytes} bytes where its manifest says {target.nbytes}"
                )

    def lost(self, key: str) -> NameLostError:
        """Return the error for an object that is on no node any more."""
        name, version = self.info.name, self.info.version
        return NameLostError(
            f"{self._what} has lost its object {key}: no node has it any more; publish the name again",
            name=name,
            version=version,
            key=key,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
