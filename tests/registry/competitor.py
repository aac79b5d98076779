"""A process that competes for one key: ``python -m tests.registry.competitor ADDRESS NAME TURNS``.

In each turn it reads the key and writes its own mark on the condition that the key still has that revision. It prints
the result as JSON: the revision that it read, its mark, and the revision of its write, or 0 if another process was
faster.
"""

from __future__ import annotations

import json
import sys

from farpool.cluster.registry import Condition, Put, open_registry


def main() -> None:
    address, name, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open_registry(address, timeout=120.0) as registry:
        print("ready", flush=True)
        sys.stdin.readline()
        for turn in range(turns):
            entry = registry.get("contested")
            read = entry.revision if entry else 0
            mark = f"{name}/{turn}"
            done = registry.commit([Condition("contested", read)], [Put("contested", mark.encode())])
            print(json.dumps([read, mark, done.revision if done.succeeded else 0]), flush=True)


if __name__ == "__main__":
    main()
