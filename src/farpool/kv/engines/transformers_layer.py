"""One layer's keys and values in a pool, as a layer of transformers' caches.

*Blocks of tokens.* A block of tokens is one storage of the pool, with the keys and values of a fixed number of tokens.
A layer is a list of such blocks and grows by adding blocks, so its length need not be known in advance. Only the last
block is still written. All other blocks keep clean copies in a lower tier, so the pager evicts them from the fast tier
without a write. For each token, each layer in turn reads its blocks in order, with one access for each block. The pager
recognizes this loop after two or three tokens: while one layer is computed, the blocks of the next layer are already
being transferred.

*The last block grows.* Each token writes to the last block of every layer, so these blocks stay in the fast tier, and
their unused room takes fast memory, too. So a last block begins with room for a few tokens. When it is full, its
content is copied into a block with twice the room. While it is short, it shares a block of the pager with the last
blocks of other layers.

*Operands are plain and exact.* Operands are the keys and values that attention receives. They are contiguous tensors
with the shape, strides and alignment that ``torch.cat`` gives in a ``DynamicCache``, so every kernel computes the same
bits. Each block is pinned and copied into the operands. This costs as much as ``torch.cat`` does in a
``DynamicCache``, and no operand aliases the arena. If the pool computes on the CPU, the next layer reuses the memory of
a layer's operands when no tensor refers to this memory any more. The reference count of the memory's storage shows
this. Operands need memory in addition to the fast tier; the pool's ledger counts it as ``KV operands``.

*Beams are lists of rows.* Reordering, repeating and selecting sequences change which stored row belongs to which
sequence, and move no bytes. If the rows of the last block are no longer the rows of the batch, this block is copied
before its next write.

Uses that would give other results are refused: gradients through the cache, a change of dtype, and direct access to the
``keys`` and ``values`` of a layer.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from farpool.errors import UnsupportedError
from farpool.ledger import Account
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.tensors.arena import ArenaViews, arena_views, device_of, is_device
from farpool.tensors.geometry import contiguous_strides

if TYPE_CHECKING:
    from farpool.ledger import Ledger
    from farpool.memory.pager.storage import Storage
    from farpool.memory.pool.block_pool import BlockPool

__all__ = ["OperandMemory", "PagedLayer"]

_SPARE_PARTS = 32
"""Memory for operands is allocated larger than needed: the extra share is one divided by this number. So the operands
can grow by some tokens before they need new memory."""
_FIRST_ROOM_PARTS = 16
"""A block begins with room for the tokens of a whole block divided by this number."""


@dataclass(slots=True)
class _Block:
    """Keys and values of some consecutive tokens of one layer.

    Attributes
    ----------
    storage : Storage
        The keys, then the values; each of shape ``(rows, heads, tokens, width)``.
    rows : int
        Number of sequences that are stored, one in each row.
    tokens : int
        Number of tokens for which the block has room. The last block of a layer may have less room than the others.
    order : torch.Tensor or None
        For each sequence of the batch, the number of its row, as int64 in host memory. None if row i belongs to
        sequence i.
    shared : bool
        True if another cache may refer to the storage, so this layer must not write to it.
    """

    storage: Storage
    rows: int
    tokens: int
    order: torch.Tensor | None = None
    shared: bool = False


class OperandMemory:
    """Host memory for one operand at a time. It is reused as soon as no tensor refers to it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._storage: torch.UntypedStorage | None = None
        self._own_references = 0
        """Number of references to the storage when only this object refers to it."""
        self._forget: Callable[[], object] = lambda: None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous tensor with unspecified elements, aligned like torch's own tensors.

        On a GPU the tensor is from torch's own allocator.
        """
        if device.type != "cpu":  # the device's allocator reuses memory itself, and respects streams
            return torch.empty(shape, dtype=dtype, device=device)
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        storage = self._storage
        if storage is None or storage.nbytes() < nbytes or _references(storage) > self._own_references:
            storage = self._make(nbytes + nbytes // _SPARE_PARTS)
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            whole = torch.empty(0, dtype=dtype).set_(storage)
            return torch.as_strided(whole, shape, contiguous_strides(shape))

    def _make(self, nbytes: int) -> torch.UntypedStorage:
        self._forget()
        with torch.inference_mode(False):
            storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        self._storage, self._own_references = storage, _references(storage)
        self._ledger.add("host", "KV operands", requested=nbytes, reserved=nbytes, touched=nbytes)
        account = Account(requested=nbytes, reserved=nbytes, touched=nbytes)
        self._forget = weakref.finalize(self, self._ledger.subtract_finally, "host", "KV operands", account)
        return storage


def _references(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and other objects that refer to the memory of a storage."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _in_pool(what: str) -> Any:
    """Make a property whose use raises an error, because the keys and values are in the pool.

    `PagedLayer.read` copies them. Setting the property to None is allowed and does nothing.
    """

    def get(layer: PagedLayer) -> None:
        layer._refuse(what)

    def set(layer: PagedLayer, value: object) -> None:
        if value is not None:
            layer._refuse(what)

    return property(get, set)


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer with full attention, in a pool.

    Parameters
    ----------
    pool : BlockPool
    name : str
        Name of the layer, for errors.
    memory : tuple of OperandMemory
        Memory for the keys and for the values that attention receives.
    tokens_per_block : int or None
        Number of tokens that are stored and moved together; None to choose it from the block sizes of the pool.

    Attributes
    ----------
    dtype : torch.dtype
    device : torch.device
        Data type and device of the keys and values. They are set by the first keys and values.
    """

    is_sliding = False
    is_croppable = True
    dtype: torch.dtype
    device: torch.device

    def __init__(
        self, pool: BlockPool, name: str, memory: tuple[OperandMemory, OperandMemory], tokens_per_block: int | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self._views: ArenaViews = arena_views(pool)
        self._name = name
        self._memory = memory
        self._asked = tokens_per_block
        self._blocks: list[_Block] = []
        self._tokens = 0
        self._batch = 0
        self._heads = 0
        self._widths = (0, 0)
        """Number of elements of a key, and of a value."""
        self._block_tokens = 0

    # ---- what transformers calls ---------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Set the dtype, the device and the shape of this layer from the first keys and values."""
        if not is_device(key_states.device, device_of(self._pool)):
            raise UnsupportedError(
                f"{self._name}: keys on {key_states.device} cannot enter a pool on {self._pool.device}: make it with "
                f"Pool(..., device={key_states.device.type!r})"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self._batch, self._heads, _, width = key_states.shape
        self._widths = (width, value_states.shape[-1])
        self._block_tokens = self._asked or self._chosen_tokens()
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of new tokens, and return the keys and values of all tokens.

        Parameters
        ----------
        key_states, value_states : torch.Tensor
            New tokens, of shape ``(batch, heads, new tokens, width)``.

        Returns
        -------
        tuple of torch.Tensor
            Contiguous keys and values of all tokens. The memory of these tensors is reused as soon as no tensor refers
            to it.

        Raises
        ------
        UnsupportedError
            The new keys and values need gradients, or differ from earlier ones in dtype, device or shape.
        BudgetError, PoolFullError, TierError
            The pool has no room, or a tier has failed; the layer is unchanged.
        """
        self._admit(key_states, value_states)
        start, stop = self._tokens, self._tokens + key_states.shape[-2]
        keys, values = (
            memory.take((self._batch, self._heads, stop, width), self.dtype, self.device)
            for memory, width in zip(self._memory, self._widths, strict=True)
        )
        whole = start - start % self._block_tokens
        self.read(0, whole, keys[..., :whole, :], values[..., :whole, :])
        # The tokens from `whole` to `start` are in the last block, which `_append` pins anyway, so it copies them, too.
        self._append(key_states, value_states, (keys, values))
        keys[..., start:, :] = key_states
        values[..., start:, :] = value_states
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of stored tokens."""
        return self._tokens

    def get_max_length(self) -> int:
        """Return -1, because there is no maximum number of tokens."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a query of this many tokens attends to, and the position of the first key."""
        return self._tokens + query_length, 0

    def offload(self) -> None:
        """Do nothing, because the pool decides which blocks are evicted from the fast tier."""

    def prefetch(self) -> None:
        """Do nothing, because the pool prefetches by itself."""

    def reset(self) -> None:
        """Forget all tokens."""
        self._blocks = []
        self._tokens = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace each sequence of the batch by the sequence with the given index, as beam search does."""
        index = beam_idx.to("cpu")
        self._rearrange(lambda order: order.index_select(0, index))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        self._rearrange(lambda order: order.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences of the batch with the given indices."""
        chosen = indices.to("cpu") if isinstance(indices, torch.Tensor) else indices
        self._rearrange(lambda order: order[chosen])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Parameters
        ----------
        tokens_to_remove : int
            Number of tokens, with a minus sign.

        Raises
        ------
        ValueError
            The number is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): expected the number of tokens to remove with a minus sign")
        self._tokens = max(0, self._tokens + tokens_to_remove)
        if self.is_initialized:
            del self._blocks[-(-self._tokens // self._block_tokens) :]

    keys = _in_pool("keys")
    values = _in_pool("values")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{self._name}: the {what} are in a pool, so there is no tensor that could be read, changed or replaced: "
            "copy them with layer.read(start, stop, keys, values), or use a DynamicCache"
        )

    # ---- blocks --------------------------------------------------------------------------------------------------

    def shapes(self, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes that the keys and the values of the whole batch have with this many tokens."""
        key, value = self._widths
        return (self._batch, self._heads, tokens, key), (self._batch, self._heads, tokens, value)

    def read(self, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the keys and values of tokens ``[start, stop)`` into tensors with the shapes from `shapes`."""
        step, begin = self._block_tokens, start
        while start < stop:
            number, first = divmod(start, step)
            last = min(stop - number * step, step)
            block = self._blocks[number]
            with self._pinned(block, Mode.READ) as pieces:
                for piece, target in zip(pieces, (keys, values), strict=True):
                    part = piece if last - first == block.tokens else piece.narrow(2, first, last - first)
                    if block.order is not None:
                        part = part.index_select(0, block.order.to(self.device))
                    target.narrow(2, start - begin, last - first).copy_(part)
            start += last - first

    def _append(
        self, keys: torch.Tensor, values: torch.Tensor, operands: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        """Store the keys and values of new tokens.

        The block of the first new token may hold earlier tokens. With `operands`, these earlier tokens are copied into
        the operands, because the block is pinned anyway.
        """
        step, stop = self._block_tokens, self._tokens + keys.shape[-2]
        blocks = self._blocks.copy()  # a failure leaves the layer as it was
        start = self._tokens
        while start < stop:
            number, first = divmod(start, step)
            last = min(stop - number * step, step)
            if first == 0:
                blocks.append(self._new_block(last))
            elif blocks[number].tokens < last or not self._writable(blocks[number]):
                blocks[number] = self._own_copy(blocks[number], first, last)
            source = slice(start - self._tokens, start - self._tokens + last - first)
            with self._pinned(blocks[number], Mode.WRITE if first else Mode.OVERWRITE) as pieces:
                for piece, states in zip(pieces, (keys, values), strict=True):
                    piece[..., first:last, :] = states[..., source, :]
                if first and operands is not None:
                    for piece, target in zip(pieces, operands, strict=True):
                        target[..., start - first : start, :] = piece[..., :first, :]
            start += last - first
        self._blocks, self._tokens = blocks, stop

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append the keys and values of tokens that were not computed here but loaded."""
        self._admit(keys, values)
        self._append(keys, values)

    def twin(self, memory: tuple[OperandMemory, OperandMemory]) -> PagedLayer:
        """Return a copy that shares all blocks with this layer. Either layer copies a shared block before writing."""
        for block in self._blocks:
            block.shared = True
        other = copy.copy(self)
        other._memory = memory
        other._blocks = [replace(block) for block in self._blocks]
        return other

    def _chosen_tokens(self) -> int:
        """Return the default number of tokens of a block.

        The keys and values of these tokens fill half of a block of the pager that small storages share. The last block
        of each layer stays in the fast tier, because each token writes to it, and smaller last blocks take less room
        there.
        """
        token = self._batch * self._heads * sum(self._widths) * self.dtype.itemsize
        return max(1, self._pool.allocation.sizes.shared // (2 * max(token, 1)))

    def _admit(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Check that keys and values fit this layer. The first keys and values set its dtype, device and shape.

        Raises
        ------
        UnsupportedError
            Dtype, device or shape differ from the first keys and values, or gradients are required.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise UnsupportedError(
                f"{self._name}: gradients do not go through keys and values in a pool: compute under torch.no_grad(), "
                "or use a DynamicCache"
            )
        for states, width in zip((key_states, value_states), self._widths, strict=True):
            found = (states.dtype, states.device, *states.shape[:2], states.shape[-1])
            if found != (self.dtype, self.device, self._batch, self._heads, width):
                raise UnsupportedError(
                    f"{self._name}: keys or values of {states.dtype} on {states.device} with shape "
                    f"{tuple(states.shape)}; the cache has {self.dtype} on {self.device} with shape ({self._batch}, "
                    f"{self._heads}, tokens, {width}): use a new cache, or a DynamicCache"
                )

    def _new_block(self, tokens: int) -> _Block:
        """Allocate a block with room for at least `tokens` tokens.

        The room is a whole block, or a half, a quarter and so on, down to one part in `_FIRST_ROOM_PARTS`.
        """
        parts = 1
        while parts < _FIRST_ROOM_PARTS and -(-self._block_tokens // (2 * parts)) >= tokens:
            parts *= 2
        room = -(-self._block_tokens // parts)
        nbytes = self._batch * self._heads * room * sum(self._widths) * self.dtype.itemsize
        return _Block(self._pool.allocate(nbytes, cls="kv", name=f"KV of {self._name}"), self._batch, room)

    def _writable(self, block: _Block) -> bool:
        return not block.shared and block.order is None and block.rows == self._batch

    def _own_copy(self, block: _Block, tokens: int, room: int) -> _Block:
        """Copy the first `tokens` tokens of a block into a new block with room for `room` tokens.

        The new block has one row for each sequence of the batch, in the order of the batch.
        """
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in self.shapes(tokens))
        copied = self._new_block(room)
        with self._pinned(block, Mode.READ) as pieces:
            for piece, target in zip(pieces, (keys, values), strict=True):
                part = piece[..., :tokens, :]
                target.copy_(part if block.order is None else part.index_select(0, block.order.to(self.device)))
        with self._pinned(copied, Mode.OVERWRITE) as pieces:
            for piece, source in zip(pieces, (keys, values), strict=True):
                piece[..., :tokens, :] = source
        return copied

    def _rearrange(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._tokens == 0:
            return
        made: dict[int, torch.Tensor] = {}
        every = torch.arange(self._batch)
        blocks = []
        for block in self._blocks:
            before = every if block.order is None else block.order
            # Blocks with the same order get the same new tensor, so that it is computed and stored once.
            order = made.get(id(before))
            if order is None:
                order = made[id(before)] = change(before)
            same = len(order) == block.rows and torch.equal(order, torch.arange(block.rows))
            blocks.append(replace(block, order=None if same else order))
        self._batch = len(change(every))
        self._blocks = blocks

    def _pinned(self, block: _Block, mode: Mode) -> _Pinned:
        """Return a context manager that pins a block and gives views of all its keys and all its values."""
        return _Pinned(self, block, mode)


class _Pinned:
    """The context manager of `PagedLayer._pinned`.

    It is a class, because a generator would take longer than the rest of an access.
    """

    __slots__ = ("_block", "_grant", "_layer", "_mode")

    def __init__(self, layer: PagedLayer, block: _Block, mode: Mode) -> None:
        self._layer, self._block, self._mode = layer, block, mode

    def __enter__(self) -> tuple[torch.Tensor, torch.Tensor]:
        layer, block = self._layer, self._block
        self._grant = layer._pool.acquire([Use(block.storage, 0, block.storage.nbytes, self._mode)], "FarpoolCache")
        place, (key, value) = self._grant.offsets[0], layer._widths
        rows, heads, tokens = block.rows, layer._heads, block.tokens
        between = rows * heads * tokens * key * layer.dtype.itemsize
        shaped = layer._views.shaped
        return (
            shaped(layer.dtype, (rows, heads, tokens, key), place),
            shaped(layer.dtype, (rows, heads, tokens, value), place + between),
        )

    def __exit__(self, *error: object) -> None:
        self._layer._pool.release(self._grant)
