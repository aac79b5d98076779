"""Read one version of a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from farpool.abc.objects import ObjectStore
from farpool.closing import Closing
from farpool.cluster.names.manifest import Manifest, Piece, TensorEntry, decode_manifest
from farpool.cluster.names.records import NameInfo
from farpool.errors import ConfigError, NameLostError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["OpenedName"]

_BATCH_BYTES = 4 << 20
"""Tensors are collected until they have this many bytes, and then read together."""


class OpenedName(Closing):
    """One version of a name, open for reading; a context manager. Its objects stay until it is closed.

    Attributes
    ----------
    info : NameInfo
        The version.
    held : bool
        True if the registry has recorded that this program reads the version. False if the registry was away (this is
        then the last version that the program knew), or could only be read (this is then the current version). If this
        is False, the version stays only for a time after a newer one has replaced it: for the `hold` time of the
        program that published the newer one.
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
        """Manifest of the version: it lists the version's objects."""
        return self._manifest

    def read(self) -> bytes:
        """Read the whole value.

        Raises
        ------
        NameLostError
            One of the objects is lost: no node has it any more.
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
        """Read the value into a buffer that is large enough; return its size in bytes. Raises the errors of `read`."""
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
        """Iterate over the pieces of the value; memory holds one piece at a time. Raises the errors of `read`."""
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
            raise ConfigError(f"{self._what} holds a value and no tensors; call read()", setting="name")
        return self._manifest.tensors

    def read_tensor_into(self, entry: TensorEntry, buffer: Buffer) -> None:
        """Read a tensor into a buffer of exactly the tensor's size. Raises the errors of `read`."""
        self.read_tensors_into([(entry, buffer)])

    def read_tensors_into(self, pairs: Iterable[tuple[TensorEntry, Buffer]]) -> None:
        """Read each tensor into a buffer of exactly the tensor's size. Raises the errors of `read`."""
        wanted: list[tuple[str, memoryview]] = []
        nbytes = 0
        for entry, buffer in pairs:
            target = memoryview(buffer)
            if target.nbytes != entry.nbytes:
                raise ValueError(f"the buffer has {target.nbytes} bytes, the tensor {entry.name!r} has {entry.nbytes}")
            if entry.nbytes:
                wanted.append((entry.key, target))
                nbytes += entry.nbytes
            if nbytes >= _BATCH_BYTES:  # one call of the store for each batch, so each batch has its own timeout
                self._fetch(wanted)
                wanted, nbytes = [], 0
        self._fetch(wanted)

    def defer(self, call: Callable[[], object]) -> None:
        """Register a function that another thread, or a later call of `Names`, will call.

        This is for finalizers, for example one that closes this opened name: a finalizer may run while its thread holds
        a lock.
        """
        self._defer(call)

    def close(self) -> None:
        """Release the version. Idempotent."""
        # We clear the attribute first, because a finalizer or another thread may close this, too.
        release, self._release = self._release, None
        if release is not None:
            release()

    def _pieces(self) -> tuple[Piece, ...]:
        if self._manifest.tensors is not None:
            raise ConfigError(f"{self._what} holds tensors and no value; call tensors()", setting="name")
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
        """Return the error for an object that no node has any more."""
        name, version = self.info.name, self.info.version
        return NameLostError(
            f"{self._what} has lost its object {key}: no node has it any more; publish the name again",
            name=name,
            version=version,
            key=key,
        )
