"""The account of every byte that farpool holds, per tier and owner.

Code that takes memory adds the bytes here, and subtracts them when it returns the memory. A call that would make an
account negative is a bug of the caller and raises ValueError.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

__all__ = ["Account", "Ledger"]


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes that one owner holds in one tier.

    Attributes
    ----------
    requested : int
        Bytes that the owner asked for.
    reserved : int
        Bytes set aside for the requested bytes, including alignment.
    page_locked : int
        Bytes that the operating system may not page out.
    touched : int
        Bytes that have been used. The operating system has backed them with memory.
    """

    requested: int = 0
    reserved: int = 0
    page_locked: int = 0
    touched: int = 0

    def __add__(self, other: Account) -> Account:
        return Account(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Account) -> Account:
        return Account(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


_EMPTY = Account()


class Ledger:
    """Accounts by tier and owner. Thread-safe."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, str], Account] = {}
        self._given_back: deque[tuple[str, str, Account]] = deque()
        """Amounts that finalizers have returned and that have not been subtracted from an account yet."""
        self._followed: list[tuple[str, Callable[[], Iterable[tuple[str, Account]]]]] = []
        self._lock = threading.Lock()

    def add(
        self, tier: str, owner: str, *, requested: int = 0, reserved: int = 0, page_locked: int = 0, touched: int = 0
    ) -> None:
        """Book bytes to `owner` in `tier`.

        Raises
        ------
        ValueError
            An amount is negative; nothing was booked.
        """
        self._book(tier, owner, Account(requested, reserved, page_locked, touched), take_back=False)

    def subtract(
        self, tier: str, owner: str, *, requested: int = 0, reserved: int = 0, page_locked: int = 0, touched: int = 0
    ) -> None:
        """Book bytes that `owner` returns to `tier`.

        Raises
        ------
        ValueError
            An amount is negative or more than the account holds; nothing was booked.
        """
        self._book(tier, owner, Account(requested, reserved, page_locked, touched), take_back=True)

    def set_bytes(self, tier: str, owner: str, nbytes: int, *, requested: int | None = None) -> None:
        """Book that `owner` now has `nbytes` bytes of `tier`. This replaces the amount that was booked before.

        Without `requested`, exactly these bytes count as requested.
        """
        account = Account(requested=nbytes if requested is None else requested, reserved=nbytes, touched=nbytes)
        with self._lock:
            self._settle()
            self._accounts.pop((tier, owner), None)
            self._change(tier, owner, account, take_back=False)

    def subtract_finally(self, tier: str, owner: str, amount: Account) -> None:
        """Book bytes that a finalizer returns.

        A finalizer may run in a thread that already holds this ledger's lock. So this method does not take the lock: it
        only appends to a queue.
        """
        self._given_back.append((tier, owner, amount))

    def follow(self, owner: str, read: Callable[[], Iterable[tuple[str, Account]]]) -> None:
        """Ask `read` for the bytes that `owner` holds, by tier, whenever the ledger is read.

        This is for owners whose bytes change in native threads, which have no access to the ledger. Do not book
        anything else to this owner.
        """
        with self._lock:
            self._followed.append((owner, read))

    def accounts(self) -> dict[tuple[str, str], Account]:
        """Return all accounts that are not empty, sorted by ``(tier, owner)``."""
        with self._lock:
            self._settle()
            accounts = dict(self._accounts)
            followed = [*self._followed]
        # Without the lock: the functions may do anything, such as warn.
        for owner, read in followed:
            accounts |= {(tier, owner): amount for tier, amount in read() if amount != _EMPTY}
        return dict(sorted(accounts.items()))

    def total(self, *, tier: str | None = None, owner: str | None = None) -> Account:
        """Return the sum of all accounts, or only of the accounts of the given tier, owner, or both."""
        total = _EMPTY
        for (of_tier, of_owner), account in self.accounts().items():
            if tier in (None, of_tier) and owner in (None, of_owner):
                total += account
        return total

    def _book(self, tier: str, owner: str, amount: Account, *, take_back: bool) -> None:
        for field in fields(amount):
            value = getattr(amount, field.name)
            if value < 0:
                raise ValueError(f"ledger: {field.name} of {owner!r} in {tier!r} is {value}, expected 0 or more")
        with self._lock:
            self._settle()
            self._change(tier, owner, amount, take_back=take_back)

    def _settle(self) -> None:
        while self._given_back:
            self._change(*self._given_back.popleft(), take_back=True)

    def _change(self, tier: str, owner: str, amount: Account, *, take_back: bool) -> None:
        before = self._accounts.get((tier, owner), _EMPTY)
        after = before - amount if take_back else before + amount
        for field in fields(after):
            if getattr(after, field.name) < 0:
                raise ValueError(
                    f"ledger: {owner!r} gives back {getattr(amount, field.name)} {field.name} bytes of {tier!r} "
                    f"but holds {getattr(before, field.name)}"
                )
        if after == _EMPTY:
            self._accounts.pop((tier, owner), None)
        else:
            self._accounts[tier, owner] = after
