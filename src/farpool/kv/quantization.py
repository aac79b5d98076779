"""Lossy codecs: KV as whole numbers of 8 or 4 bits, with a bound on the error of each element.

This follows KIVI (Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024). Keys are
quantized per channel, because a few channels are much larger than the others: a group is 32 tokens of one channel of
one head. Values are quantized per token: a group is 32 channels of one token of one head. Latents that do not separate
keys and values (MLA) are quantized like values. A group's smallest and largest elements are stored as they are. Each
element is stored as a code: its distance from the smallest element, counted in steps of ``(largest - smallest) / (2 **
bits - 1)``.

For each element ``x`` and its decoded value ``y``, ``|x - y|`` is at most half a step plus the rounding of ``y`` to the
type of the elements (half a unit in the last place of the group's largest magnitude), and never more than one step.
Float32 arithmetic adds at most 1/1024 of a step and 2**-21 of that magnitude.

A payload that contains NaN or infinity, or groups whose steps are outside the range of float32, is stored as it is.
Negative zeros become positive. The arithmetic follows IEEE 754 with one rounding for each operation, so the same
payload always gives the same bytes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farpool.errors import ConfigError
from farpool.kv.compression import CodecError, element_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from farpool.kv.namespace import Namespace

__all__ = ["GROUP", "Axes", "Quantized"]

GROUP = 32
"""Maximum number of elements of a group, as in KIVI. The last group of an axis may be shorter."""

_LETTERS = "slthd"
_SLICE = 1 << 17
"""Number of elements that are processed at a time. It is small enough that they stay in the core's cache, and in memory
that this thread has used before.
"""
_LARGEST, _SMALLEST_STEP = 2.0**120, 2.0**-100
"""Largest magnitude of a group's elements, and smallest step. Within these limits, float32 arithmetic neither overflows
nor loses bits.
"""


@dataclass(frozen=True, slots=True)
class Axes:
    """Meaning and sizes of a payload's axes, the outermost axis first.

    Attributes
    ----------
    order : str
        A letter for each axis: ``s`` keys (0) and values (1), ``l`` layers, ``t`` tokens, ``h`` heads, ``d`` channels
        of a head. ``t`` and ``d`` are required.
    sizes : tuple of int
        Sizes of these axes, at least 1 each; the size of ``s`` is 2.

    Raises
    ------
    ConfigError
        A letter or a size is wrong.
    """

    order: str
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        known = len(set(self.order)) == len(self.order) and set("td") <= set(self.order) <= set(_LETTERS)
        if not known or len(self.sizes) != len(self.order):
            raise ConfigError(
                f"axes {self.order!r} of sizes {self.sizes} are not known; expected letters of {_LETTERS!r}, each "
                "once, t and d among them, and a size for each",
                setting="layout",
            )
        if min(self.sizes) < 1 or ("s" in self.order and self.sizes[self.order.index("s")] != 2):
            raise ConfigError(f"axes {self.order!r} of sizes {self.sizes}; expected at least 1, and 2 for s")

    @classmethod
    def of(cls, namespace: Namespace, group: int) -> Axes:
        """Return the axes of the payloads of one group of layers.

        Raises
        ------
        ConfigError
            The namespace's layout does not consist of letters of axes, or these axes do not give the size of the
            group's blocks.
        """
        layout, own = namespace.layout, namespace.groups[group]
        sizes = {"s": 2, "l": 1, "t": namespace.tokens_per_block, "h": namespace.heads, "d": namespace.head_dim}
        if own.kind == "recurrent" or not set(layout) <= set(_LETTERS):
            raise ConfigError(
                f"layout {layout!r} ({own.kind}): int8 and int4 need the order of the axes as letters of {_LETTERS!r} "
                "such as 'slthd', and no recurrent state; use the codec zstd",
                setting="layout",
            )
        known = math.prod(sizes[axis] for axis in layout) * element_bytes(namespace.dtype)
        layers = own.block_bytes // known if known and "l" in layout else 1
        if not known or layers * known != own.block_bytes:
            raise ConfigError(
                f"layout {layout!r}: its axes do not give blocks of {own.block_bytes} bytes; check heads and head_dim",
                setting="layout",
            )
        return cls(layout, tuple({**sizes, "l": layers}[axis] for axis in layout))


@dataclass(frozen=True, slots=True)
class _Float:
    """An element type: `dtype` is its type in torch, and `bits` is the numpy type of arrays that hold its bits."""

    bits: str
    dtype: torch.dtype

    def widen(self, bits: NDArray[Any], into: NDArray[np.float32]) -> None:
        """Convert elements, given by their bits, to float32 in `into`.

        This uses numpy, because torch warns about read-only memory.
        """
        if self.dtype == torch.bfloat16:
            wide = into.view(np.uint32)
            wide[...] = bits
            wide <<= 16
        else:
            into[...] = bits

    def narrow(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """Round float32 values to the nearest elements of this type, ties to even; return the elements' bits."""
        of_size = torch.uint32 if self.dtype == torch.float32 else torch.uint16
        return torch.from_numpy(values).to(self.dtype).view(of_size).numpy().view(self.bits)


_FLOATS = {
    "float32": _Float("<f4", torch.float32),
    "float16": _Float("<f2", torch.float16),
    "bfloat16": _Float("<u2", torch.bfloat16),
}


class Quantized:
    """Codec that stores a code of 8 or 4 bits for each element, and the smallest and largest element of each group.

    The payload is encoded in parts: first the parts of the keys, then the parts of the values. Each part is stored as
    the smallest elements of its groups, the largest elements of its groups, and the codes. Two codes of 4 bits share a
    byte; the first of them is in the lower half.

    Parameters
    ----------
    bits : int
        8 or 4.
    dtype : str
        ``float32``, ``float16`` or ``bfloat16``.
    axes : Axes or None
        Axes of the payload.

    Raises
    ------
    ConfigError
        `dtype` is not one of these types, or `axes` is None.
    """

    def __init__(self, bits: int, dtype: str, axes: Axes | None) -> None:
        self.name = f"int{bits}"
        if dtype not in _FLOATS:
            raise ConfigError(f"dtype: {self.name} is for {', '.join(_FLOATS)}, not for {dtype!r}; use the codec zstd")
        if axes is None:
            raise ConfigError(f"codec: {self.name} needs the axes of the payload; use the codec zstd", setting="codec")
        self._bits = bits
        self._levels = np.float32(2**bits - 1)
        self._float = _FLOATS[dtype]
        self._axes = axes
        self._memory = threading.local()
        self._nbytes = math.prod(axes.sizes) * element_bytes(dtype)

    def pack(self, payload: NDArray[np.uint8]) -> list[Buffer] | None:
        if len(payload) != self._nbytes:
            raise ConfigError(f"a payload has {len(payload)} bytes; its axes {self._axes} give {self._nbytes}")
        stored: list[Buffer] = []
        zero, one = np.float32(0), np.float32(1)
        with np.errstate(all="ignore"):  # NaN and infinity are detected below
            for group, axis in self._groups(payload):
                values = self._scratch(group.shape)
                self._float.widen(group, values)
                wide = torch.from_numpy(values)
                # Torch finds the extremes several times as fast as numpy. Adding 0 turns a negative zero into a
                # positive one.
                smallest, largest = (extreme(axis, keepdim=True).numpy() + zero for extreme in (wide.amin, wide.amax))
                step = (largest - smallest) / self._levels
                countable = (smallest == largest) | (step >= _SMALLEST_STEP)  # a tiny step may have become 0
                if not (countable & (smallest >= -_LARGEST) & (largest <= _LARGEST)).all():
                    return None
                wide -= torch.from_numpy(smallest)
                wide /= torch.from_numpy(np.where(step == 0, one, step))
                codes = wide.round_().numpy().astype(np.uint8).reshape(-1)
                for bounds in (smallest, largest):
                    stored.append(self._float.narrow(bounds).reshape(-1).view(np.uint8).data)
                stored.append(self._packed(codes).data)
        return stored

    def unpack(self, stored: NDArray[np.uint8], payload: NDArray[np.uint8]) -> None:
        if len(payload) != self._nbytes:
            raise CodecError(f"the payload has {len(payload)} bytes; its axes {self._axes} give {self._nbytes}")
        place = 0

        def take(nbytes: int) -> NDArray[np.uint8]:
            nonlocal place
            piece = stored[place : place + nbytes]
            if len(piece) < nbytes:
                raise CodecError(f"{len(stored)} bytes are too few for a payload of {len(payload)}")
            place += nbytes
            return piece

        with np.errstate(all="ignore"):  # the bounds may be any bits
            for group, axis in self._groups(payload):
                shape = list(group.shape)
                shape[axis] = 1
                bounds = np.empty((2, *shape), np.float32)
                self._float.widen(take(bounds.size * group.itemsize).view(self._float.bits).reshape(2, *shape), bounds)
                smallest, largest = bounds
                if not ((smallest <= largest) & (smallest >= -_LARGEST) & (largest <= _LARGEST)).all():
                    raise CodecError("a group has bounds that no encoder writes")
                values = self._scratch(group.shape)
                values[...] = self._unpacked(take(-(-group.size * self._bits // 8)), group.size).reshape(group.shape)
                wide = torch.from_numpy(values)
                wide *= torch.from_numpy((largest - smallest) / self._levels)
                wide += torch.from_numpy(smallest)
                group[...] = self._float.narrow(values)
        if place != len(stored):
            raise CodecError(f"{len(stored)} bytes are more than the {place} of a payload of {len(payload)}")

    def _groups(self, payload: NDArray[np.uint8]) -> Iterator[tuple[NDArray[Any], int]]:
        """Yield the parts in which the payload is encoded, in the order in which they are stored.

        Each part is yielded with the index of the axis along which its groups extend.
        """
        axes = self._axes
        array = payload.view(self._float.bits).reshape(axes.sizes)
        order = [axes.order.index(axis) for axis in _LETTERS if axis in axes.order]
        array = array.transpose(order)
        rest = "".join(axis for axis in _LETTERS if axis in axes.order and axis != "s")
        both = ((array[0], "t"), (array[1], "d")) if "s" in axes.order else ((array, "d"),)
        for half, letter in both:
            axis = rest.index(letter)
            for start in range(0, half.shape[axis], GROUP):
                run = half[(slice(None),) * axis + (slice(start, start + GROUP),)]
                rows = len(run) if axis == 0 else max(1, _SLICE * len(run) // run.size)
                for first in range(0, len(run), rows):
                    yield run[first : first + rows], axis

    def _scratch(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return this thread's reusable float32 memory in this shape. New memory would cost many page faults."""
        size = math.prod(shape)
        if getattr(self._memory, "array", np.empty(0)).size < size:
            self._memory.array = np.empty(max(size, _SLICE), np.float32)
        array: NDArray[np.float32] = self._memory.array
        return array[:size].reshape(shape)

    def _packed(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self._bits == 8:
            return codes
        pairs: NDArray[np.uint16] = np.pad(codes, (0, len(codes) % 2)).view("<u2")
        return (pairs | pairs >> 4).astype(np.uint8)

    def _unpacked(self, packed: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
        if self._bits == 8:
            return packed
        pairs: NDArray[np.uint16] = packed.astype("<u2")
        pairs |= pairs << 4
        pairs &= 0x0F0F
        return pairs.view(np.uint8)[:count]
