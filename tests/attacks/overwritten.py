"""A value was overwritten while the first node of its key was away: what does the command print with its defaults?"""

from __future__ import annotations

from tests.attacks.lab import MIB, Key, Lab, command
from tests.attacks.program import Outcome, attack, main

KEYS = 12
TOLD = 3
"""Puts with the command."""
KEY = Key("program")


@attack
def get_with_defaults(lab: Lab, harmless: bool) -> Outcome:
    """Overwrite values of two copies while a node is down, then use `farpool store get`; in the control all are up."""
    nodes = [lab.node(16 * MIB, [KEY]) for _ in range(3)]
    names = [f"key {number}" for number in range(KEYS)]
    with lab.store(nodes, KEY, replicas=2) as store:
        for name in names:
            store.put(name, b"old")
    away = lab.random.choice(nodes)
    if not harmless:
        away.kill()
    replaced = []
    with lab.store(nodes, KEY, replicas=2) as store:
        for name in names:
            outcome: object = store.put(name, b"new")
            # A put that keeps what is there has overwritten nothing, and says so.
            if outcome != "present":
                replaced.append(name)
    if not harmless:
        away.start()
    kept = [name for name in names if name not in replaced][:TOLD]
    said = [command(["put", name, "-"], nodes, KEY, input=b"newer") for name in kept]
    untold = sum(not (done.returncode == 0 and done.stderr.startswith(b"present")) for done in said)
    stale = fresh = missing = failed = 0
    for name in replaced:
        done = command(["get", name], nodes, KEY)
        stale += done.returncode == 0 and done.stdout == b"old"
        fresh += done.returncode == 0 and done.stdout == b"new"
        missing += done.returncode == 1
        failed += done.returncode > 1
    return Outcome(
        not stale and not untold,
        f"{stale} of {len(replaced)} overwritten values printed with exit code 0"
        + f", {untold} of {len(kept)} puts that kept the value did not say so" * bool(kept),
        {"puts confirmed in the place of a value": len(replaced), "puts that kept the value": KEYS - len(replaced)},
        {"new values printed": fresh, "said to be missing": missing, "failed": failed},
    )


if __name__ == "__main__":
    main()
