"""Lists of many objects on many connections: what else is still answered?"""

from __future__ import annotations

import select
from contextlib import ExitStack

from tests.attacks.lab import MIB, Key, Lab, Node
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Connection

LENT = 64 * MIB
OBJECTS = 100_000
LISTS = 64
CALLS = 20
MOST_LISTS = LISTS // 2
"""Lists that may be answered while others make their calls. Where these wait for the lists, all are."""
FILLER = Key("filler", ("publish",), tenant=2)
LISTER = Key("lister", ("read",), tenant=2)
OTHER = Key("other", tenant=1)


@attack
def beside_other_calls(lab: Lab, harmless: bool) -> Outcome:
    """Ask for 64 lists with a prefix that nobody has, and call `stats` as another tenant; the control asks for one."""
    node, asked = filled(lab), 1 if harmless else LISTS
    with ExitStack() as open_until, node.connect(OTHER, purpose="control") as calls, node.connect(OTHER) as data:
        assert data.put(b"key", b"value").done
        lists = [open_until.enter_context(node.connect(LISTER, purpose="control")) for _ in range(asked)]
        ask_for_lists(lists)
        done = sum("capacity" in calls.stats() and data.get(b"key").done for _ in range(CALLS))
        answered = len(answers(lists))
    return Outcome(
        done == CALLS and answered <= MOST_LISTS,
        f"{answered} of {asked} lists were answered before {done} calls of another tenant",
        {"objects of the tenant that lists": OBJECTS, "lists": asked, "calls and gets of the other": CALLS},
    )


@attack
def beside_another_list(lab: Lab, harmless: bool) -> Outcome:
    """Ask for 64 such lists, and list one object as another tenant; the control asks for one."""
    node, asked = filled(lab), 1 if harmless else LISTS
    with ExitStack() as open_until, node.connect(OTHER, purpose="control") as calls, node.connect(OTHER) as data:
        assert data.put(b"key", b"value").done
        lists = [open_until.enter_context(node.connect(LISTER, purpose="control")) for _ in range(asked)]
        ask_for_lists(lists)
        found = len(calls.list_objects(b"key").result["objects"])
        answered = len(answers(lists))
    return Outcome(
        found == 1 and answered <= MOST_LISTS,
        f"{answered} of {asked} lists were answered before the list of another tenant, which has one object",
        {"objects of the tenant that lists": OBJECTS, "lists": asked, "lists of the other": 1},
    )


def filled(lab: Lab) -> Node:
    """A node with many objects of one tenant."""
    node = lab.node(LENT, [FILLER, LISTER, OTHER])
    with node.connect(FILLER) as connection:
        for first in range(0, OBJECTS, 1000):
            connection.put_many([(b"%0200d" % number, b"x") for number in range(first, first + 1000)])
    return node


def ask_for_lists(connections: list[Connection]) -> None:
    """One list on each connection, with a prefix that nobody has; no answer is waited for."""
    for connection in connections:
        connection.send_call("list", prefix=b"nobody has this")


def answers(connections: list[Connection]) -> list[Connection]:
    """Those that have something to be received."""
    return select.select(connections, [], [], 0)[0]


if __name__ == "__main__":
    main()
