import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool.ledger import Account, Ledger


def test_accounts_are_kept_by_tier_and_owner() -> None:
    ledger = Ledger()
    ledger.add("dram", "weights", requested=100, reserved=128)
    ledger.add("dram", "kv", requested=10, reserved=64, page_locked=64)
    ledger.add("nvme", "weights", requested=1, reserved=4096, touched=4096)
    ledger.add("dram", "weights", touched=100)
    assert ledger.accounts() == {
        ("dram", "kv"): Account(10, 64, 64, 0),
        ("dram", "weights"): Account(100, 128, 0, 100),
        ("nvme", "weights"): Account(1, 4096, 0, 4096),
    }
    assert ledger.total() == Account(111, 4288, 64, 4196)
    assert ledger.total(tier="dram") == Account(110, 192, 64, 100)
    assert ledger.total(owner="weights") == Account(101, 4224, 0, 4196)
    assert ledger.total(tier="cxl") == Account()


def test_an_empty_account_disappears() -> None:
    ledger = Ledger()
    ledger.add("dram", "weights", reserved=10)
    ledger.subtract("dram", "weights", reserved=10)
    assert ledger.accounts() == {}


def test_giving_back_more_than_there_is_is_an_error_and_changes_nothing() -> None:
    ledger = Ledger()
    ledger.add("dram", "weights", requested=10, reserved=64)
    with pytest.raises(ValueError, match="'weights' gives back 65 reserved bytes of 'dram' but holds 64"):
        ledger.subtract("dram", "weights", requested=5, reserved=65)
    with pytest.raises(ValueError, match="requested"):
        ledger.subtract("nvme", "weights", requested=1)
    assert ledger.total() == Account(10, 64, 0, 0)


def test_negative_amounts_are_refused() -> None:
    ledger = Ledger()
    for book in (ledger.add, ledger.subtract):
        with pytest.raises(ValueError, match=r"touched .* is -1"):
            book("dram", "weights", touched=-1)


def test_threads_may_book_at_once() -> None:
    ledger = Ledger()

    def work() -> None:
        for _ in range(500):
            ledger.add("dram", "weights", reserved=2)
            ledger.subtract("dram", "weights", reserved=1)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ledger.total().reserved == 2000


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(-50, 100)), max_size=50))
def test_the_total_is_the_sum_and_never_negative(steps: list[tuple[str, str, int]]) -> None:
    ledger, model = Ledger(), {}
    for tier, owner, amount in steps:
        held = model.get((tier, owner), 0)
        if amount >= 0:
            ledger.add(tier, owner, reserved=amount)
            model[tier, owner] = held + amount
        elif held + amount >= 0:
            ledger.subtract(tier, owner, reserved=-amount)
            model[tier, owner] = held + amount
        else:
            with pytest.raises(ValueError, match="gives back"):
                ledger.subtract(tier, owner, reserved=-amount)
    assert ledger.total().reserved == sum(model.values())


def test_a_finalizer_may_give_back_in_the_middle_of_a_booking() -> None:
    ledger = Ledger()
    ledger.add("host", "operands", reserved=7)

    class Collecting(dict[tuple[str, str], Account]):
        """Accounts whose change runs a finalizer, as any allocation may by a garbage collection."""

        def __setitem__(self, key: tuple[str, str], account: Account) -> None:
            if key == ("host", "weights"):
                ledger.subtract_finally("host", "operands", Account(reserved=7))
            super().__setitem__(key, account)

    ledger._accounts = Collecting(ledger._accounts)
    ledger.add("host", "weights", reserved=1)
    assert ledger.total(owner="weights").reserved == 1
    assert ledger.total(owner="operands").reserved == 0


def test_an_owner_that_is_followed_has_what_it_says_at_each_look() -> None:
    ledger = Ledger()
    held = {"dram": 0, "far": 0}
    ledger.follow("page locks", lambda: [(tier, Account(page_locked=nbytes)) for tier, nbytes in held.items()])
    ledger.add("dram", "kv", reserved=10)
    assert ledger.accounts() == {("dram", "kv"): Account(reserved=10)}
    held["dram"] = 4096
    assert ledger.accounts() == {
        ("dram", "kv"): Account(reserved=10),
        ("dram", "page locks"): Account(page_locked=4096),
    }
    assert ledger.total(tier="dram") == Account(reserved=10, page_locked=4096)
    held |= {"dram": 0, "far": 1}
    assert ledger.total(owner="page locks") == ledger.total(tier="far") == Account(page_locked=1)
    held["far"] = 0
    assert ledger.total(owner="page locks") == Account()


def test_an_owner_that_is_followed_may_read_the_ledger_itself() -> None:
    ledger = Ledger()
    ledger.add("dram", "kv", reserved=10)
    seen: list[Account] = []

    def read() -> list[tuple[str, Account]]:
        if not seen:  # the look below asks for this owner again
            seen.append(Account())
            seen[0] = ledger.total(tier="dram")
        return []

    ledger.follow("page locks", read)
    assert ledger.total() == Account(reserved=10)
    assert seen == [Account(reserved=10)]
