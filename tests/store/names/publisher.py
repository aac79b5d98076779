"""A process that publishes under a contested name: ``python -m tests.store.names.publisher REGISTRY FOLDER MARK
TURNS``.

It reads the current version, and publishes its mark as the next one if the name still has that version. For each turn
it prints the version that it read, the mark that it published, and the version that it made (0 if it was refused) as
JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from farpool.cluster.names import Names
from farpool.errors import NameHeldError, NameMissingError, NameMovedError
from tests.store.names.folder_store import FolderStore


def main() -> None:
    registry, folder, mark, turns = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    with Names(FolderStore(folder), registry, writer=mark, hold=0.0, lease=2.0, timeout=120.0) as names:
        print("ready", flush=True)
        sys.stdin.readline()
        for turn in range(turns):
            seen = 0
            try:
                with names.open("contested") as opened:
                    seen = opened.info.version
                    assert opened.read().count(b"/") == 1
            except NameMissingError:
                pass
            told = [seen, f"{mark}/{turn}", 0]
            with contextlib.suppress(NameHeldError, NameMovedError):
                told[2] = names.publish("contested", str(told[1]).encode(), expect=seen).version
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
