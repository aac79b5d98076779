"""Connections of a key that stay open and say nothing after the handshake: who else is let in?"""

from __future__ import annotations

import contextlib
from contextlib import ExitStack

from tests.attacks.lab import MIB, Key, Lab
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Connection, Denied

FILES = 512
"""That the node may have open. A few hundred connections show what more do under a higher limit."""
IDLE = 600
CLIENTS = 10
PATIENCE = 5.0
IDLER = Key("idler", ("read",), tenant=1)
SAME_TENANT = Key("same", tenant=1)
OTHER_TENANT = Key("other", tenant=2)


@attack
def keep_others_out(lab: Lab, harmless: bool) -> Outcome:
    """Open connections with one key as long as the node lets it, then connect with others; the control closes them."""
    node = lab.node(16 * MIB, [IDLER, SAME_TENANT, OTHER_TENANT], files=FILES)
    served = {SAME_TENANT.name: 0, OTHER_TENANT.name: 0}
    refused = ""
    with ExitStack() as until_the_end:
        idle = []
        for number in range(IDLE):
            purpose = "data" if number % 2 else "control"
            try:
                one = Connection(node.where, IDLER.pair, purpose=purpose, timeout=PATIENCE)
            except (OSError, Denied) as error:
                refused = str(error)
                break
            idle.append(until_the_end.enter_context(one))
        if harmless:
            until_the_end.pop_all().close()
        for key in (SAME_TENANT, OTHER_TENANT):
            for _ in range(CLIENTS):
                with contextlib.suppress(OSError, Denied):
                    one = until_the_end.enter_context(Connection(node.where, key.pair, timeout=PATIENCE))
                    served[key.name] += one.ping().done
    missing = {name: CLIENTS - count for name, count in served.items()}
    return Outcome(
        not any(missing.values()),
        f"{missing[SAME_TENANT.name]} of {CLIENTS} clients of another key of the tenant and "
        f"{missing[OTHER_TENANT.name]} of {CLIENTS} of another tenant locked out by {len(idle)} idle connections",
        {"files that the node may open": FILES, "idle connections tried": IDLE, "clients": 2 * CLIENTS},
        {"what the next idle connection is told": refused},
    )


if __name__ == "__main__":
    main()
