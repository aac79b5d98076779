"""The tape: the recorded sequence of accesses, and where the program stands on it.

The tape is simply the history. A program that loops does again what followed the last time it stood in the same
context, so a pointer trails the present by one turn of the loop: at each access it moves on by one, and what lies
between it and the present is the future. The context is the last few accesses. When the program does something else
than the pointer foretells, the pointer looks for the context in the history and goes on from there. Nothing has to
know what a step is:

- an inner loop (micro-batches) inside an outer one (optimizer steps): at the end of the inner loop the pointer jumps
  once, to the end of the inner loop of the turn before, and from then on trails by a whole outer turn;
- training and evaluation, or prefill and decode: each is found again by its own context;
- accesses picked by data (rows of a table) are a single wildcard, so they do not break the context.

Positions count accesses from the beginning and only grow. The history is a ring; what fell out of it is forgotten.
"""

from __future__ import annotations

from array import array

__all__ = ["NEVER", "Tape"]

NEVER = 1 << 61
"""A next use beyond the known future. Added to it: how long ago the block was used, so that the least recent goes
first."""

_CONTEXT = 3
_CONFIRM = 4
_SKIP = 8
_STRAY = 3


class Tape:
    """History of accesses with a pointer that trails the present.

    Parameters
    ----------
    length : int
        Accesses to remember; a loop longer than this is not predicted.
    """

    def __init__(self, length: int = 1 << 18) -> None:
        self._length = length
        self._tokens = array("q")
        self._sizes = array("q")
        self._next = array("q")
        """Position of the next access to the same first block; 0 while there is none yet."""
        self._last: dict[int, int] = {}
        self._contexts: dict[tuple[int, ...], int] = {}
        self._context: tuple[int, ...] = ()
        self.now = -1
        """Position of the latest access."""
        self.pointer = -1
        """Position whose successor is expected next; -1 off the tape."""
        self._confirmed = 0
        self._strays = 0
        self.divergences = 0
        self.jumps = 0
        """Counts the times that the pointer landed somewhere new, or got lost: older keys mean nothing after that."""

    @property
    def followed(self) -> bool:
        """Whether the future is known well enough to act on it."""
        return self._confirmed >= _CONFIRM

    def token(self, position: int) -> tuple[int, int, bool]:
        """``(name, count, created)`` of an access still in the ring; the name is -1 for a wildcard."""
        token = self._tokens[position % self._length]
        if token < 0:
            return -1, 0, False
        return token >> 25, (token >> 1) & 0xFFFFFF, bool(token & 1)

    def nbytes(self, position: int) -> int:
        """Bytes of the access at a position."""
        return self._sizes[position % self._length]

    def record(self, name: int, count: int, nbytes: int, *, created: bool = False) -> int:
        """Append an access to `count` blocks from `name` on; returns their next use (or beyond `NEVER`)."""
        token = (name << 25) | (count << 1) | created
        self._append(token, nbytes)
        now = self.now
        before = self._last.get(name, -1)
        if before >= 0 and before > now - self._length:
            self._next[before % self._length] = now
        self._last[name] = now
        if self.followed:
            upcoming = self._next[self.pointer % self._length]
            if upcoming > self.pointer:
                return upcoming
        return 2 * NEVER - now

    def record_table(self, name: int) -> int:
        """Append an access to rows of a table, picked by data; several in a row count as one. Returns their key."""
        token = -1 - name
        if self.now < 0 or self._tokens[self.now % self._length] != token:
            self._append(token, 0)
        return 2 * NEVER - self.now

    def _append(self, token: int, nbytes: int) -> None:
        follows = self._advance(token)
        self.now = now = self.now + 1
        slot = now % self._length
        if now < self._length:
            self._tokens.append(token)
            self._sizes.append(nbytes)
            self._next.append(0)
        else:
            self._tokens[slot], self._sizes[slot], self._next[slot] = token, nbytes, 0
        self._context = context = (*self._context[1 - _CONTEXT :], token)
        if len(context) == _CONTEXT:
            if not follows:
                self._search(context)
            if len(self._contexts) > 2 * self._length:
                self._prune()
            self._contexts[context] = now

    def _advance(self, token: int) -> bool:
        """Move the pointer to this token if it lies just ahead; False if the context has to be searched."""
        pointer = self.pointer
        if pointer < 0:
            return False
        if pointer <= self.now - self._length + _SKIP:
            self._lose()
            return False
        tokens, length = self._tokens, self._length
        if tokens[(pointer + 1) % length] == token:
            self.pointer = pointer + 1
            self._confirmed += 1
            self._strays = 0
            return True
        self.divergences += 1
        for ahead in range(pointer + 2, min(pointer + _SKIP, self.now) + 1):
            if tokens[ahead % length] == token:
                self.pointer = ahead
                self._strays = 0
                return True
        return False

    def _search(self, context: tuple[int, ...]) -> None:
        found = self._contexts.get(context, -1)
        if found > self.now - self._length + _SKIP:
            if found != self.pointer:
                self.jumps += 1
                self._confirmed = 0
            self.pointer = found
            self._strays = 0
        elif self.pointer >= 0:
            self._strays += 1
            if self._strays > _STRAY:
                self._lose()

    def _lose(self) -> None:
        self.pointer = -1
        self._confirmed = self._strays = 0
        self.jumps += 1

    def _prune(self) -> None:
        oldest = self.now - self._length
        self._contexts = {context: position for context, position in self._contexts.items() if position > oldest}
        self._last = {first: position for first, position in self._last.items() if position > oldest}

    def upcoming(self) -> dict[int, int]:
        """First coming use of each block that the known future names: first block of the access -> position."""
        known: dict[int, int] = {}
        for position in range(self.now, self.pointer, -1):
            token = self._tokens[position % self._length]
            if token >= 0:
                first, count = token >> 25, (token >> 1) & 0xFFFFFF
                for block in range(first, first + count):
                    known[block] = position
        return known
