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

__all__ = ["NEVER", "SPARE", "Tape", "coming_use"]

SPARE = 1 << 60
"""Added to a next use: the block is not kept until then (see `farpool.engine.retention`)."""
NEVER = 1 << 61
"""A next use beyond the known future. Added to it: how long ago the block was used, so that the least recent goes
first."""


def coming_use(key: int) -> int:
    """The position that a key stands for; a key beyond `NEVER` stands for itself."""
    return key if key >= NEVER else key & (SPARE - 1)


_CONTEXT = 3
_CONFIRM = 4
_SKIP = 8
_STRAY = 3
_FIRST_INDEX = 1 << 12
_MASK = (1 << 64) - 1


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
        self._volume = array("q")
        """Bytes of all accesses up to here."""
        self._clock = array("d")
        """Seconds that the program has computed up to here."""
        self._next = array("q")
        """Position of the next access to the same first block; 0 while there is none yet."""
        self._last = array("q")
        """By name: position of the latest access that began with this block; -1 if there was none."""
        self._index = array("q", [-1]) * _FIRST_INDEX
        """By hash of a context: the latest position where one with that hash ended."""
        self.now = -1
        """Position of the latest access."""
        self.pointer = -1
        """Position whose successor is expected next; -1 off the tape."""
        self._confirmed = 0
        self._strays = 0
        self.foretold = False
        """Whether the latest access was the one expected."""
        self.divergences = 0
        self.jumps = 0
        """Counts the times that the pointer landed somewhere new, or got lost: older keys mean nothing after that."""

    @property
    def followed(self) -> bool:
        """Whether the future is known well enough to act on it."""
        return self._confirmed >= _CONFIRM

    # ---- looking ------------------------------------------------------------------------------------------------

    def token(self, position: int) -> tuple[int, int, bool]:
        """``(name, count, created)`` of an access still in the ring; the name is -1 for a wildcard."""
        token = self._tokens[position % self._length]
        if token < 0:
            return -1, 0, False
        return token >> 25, (token >> 1) & 0xFFFFFF, bool(token & 1)

    def nbytes(self, position: int) -> int:
        """Bytes of the access at a position."""
        return self._sizes[position % self._length]

    def volume(self, start: int, stop: int) -> int:
        """Bytes accessed after position `start`, up to and with `stop`."""
        return self._volume[stop % self._length] - self._volume[start % self._length]

    def seconds(self, start: int, stop: int) -> float:
        """Seconds that the program computed between two positions."""
        return self._clock[stop % self._length] - self._clock[start % self._length]

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

    # ---- recording ----------------------------------------------------------------------------------------------

    def record(self, name: int, count: int, nbytes: int, created: bool = False, busy: float = 0.0) -> int:
        """Append an access to `count` blocks from `name` on; returns their next use (or beyond `NEVER`).

        Parameters
        ----------
        nbytes : int
            Bytes of these blocks.
        created : bool
            The blocks have no content yet: the program has made them just now.
        busy : float
            Seconds that the program has computed since its access before.
        """
        now = self._append((name << 25) | (count << 1) | created, nbytes, busy)
        last = self._last
        if name >= len(last):
            last.extend([-1] * (name + 1 + len(last)))
        before = last[name]
        if before >= 0 and before > now - self._length:
            self._next[before % self._length] = now
        last[name] = now
        if self._confirmed >= _CONFIRM:
            upcoming = self._next[self.pointer % self._length]
            if upcoming > self.pointer:
                return upcoming
        return 2 * NEVER - now

    def record_table(self, name: int, busy: float = 0.0) -> int:
        """Append an access to rows of a table, picked by data; several in a row count as one. Returns their key."""
        token = -1 - name
        if self.now < 0 or self._tokens[self.now % self._length] != token:
            self._append(token, 0, busy)
        else:
            self._clock[self.now % self._length] += busy
        return 2 * NEVER - self.now

    def _append(self, token: int, nbytes: int, busy: float) -> int:
        tokens, length, now, pointer = self._tokens, self._length, self.now, self.pointer
        follows = False
        if pointer >= 0:
            if pointer > now - length + _SKIP and tokens[(pointer + 1) % length] == token:
                self.foretold = self._confirmed >= _CONFIRM
                self.pointer = pointer + 1
                self._confirmed += 1
                self._strays = 0
                follows = True
            else:
                self.foretold = False
                follows = self._skip_to(token)
        slot = (now + 1) % length
        if now < 0:
            volume, clock = nbytes, busy
        else:
            volume, clock = self._volume[now % length] + nbytes, self._clock[now % length] + busy
        if now + 1 < length:
            tokens.append(token)
            self._sizes.append(nbytes)
            self._next.append(0)
            self._volume.append(volume)
            self._clock.append(clock)
        else:
            tokens[slot], self._sizes[slot], self._next[slot] = token, nbytes, 0
            self._volume[slot], self._clock[slot] = volume, clock
        self.now = now = now + 1
        if now >= _CONTEXT - 1:
            place = self._place(now)
            if not follows:
                self._search(place)
            self._index[place] = now
            if now < length and 2 * now > len(self._index):
                self._enlarge_index()
        return now

    def _place(self, position: int) -> int:
        """Where the index keeps the context that ends at a position."""
        tokens, length = self._tokens, self._length
        mixed = 0x9E3779B97F4A7C15
        for back in (2, 1, 0):
            mixed = ((mixed ^ (tokens[(position - back) % length] & _MASK)) * 0xFF51AFD7ED558CCD) & _MASK
            mixed ^= mixed >> 32
        return mixed % len(self._index)

    def _enlarge_index(self) -> None:
        self._index = array("q", [-1]) * (4 * len(self._index))
        for position in range(_CONTEXT - 1, self.now + 1):
            self._index[self._place(position)] = position

    def _skip_to(self, token: int) -> bool:
        """Move the pointer to this token if it lies a little ahead; False if the context has to be searched."""
        pointer, tokens, length = self.pointer, self._tokens, self._length
        if pointer <= self.now - length + _SKIP:
            self._lose()
            return False
        self.divergences += 1
        for ahead in range(pointer + 2, min(pointer + _SKIP, self.now) + 1):
            if tokens[ahead % length] == token:
                self.pointer = ahead
                self._strays = 0
                return True
        return False

    def _search(self, place: int) -> None:
        found, now, tokens, length = self._index[place], self.now, self._tokens, self._length
        if found > max(0, now - length + _SKIP) and all(
            tokens[(found - back) % length] == tokens[(now - back) % length] for back in range(_CONTEXT)
        ):
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
