"""``python -m farpool``: the ``farpool`` command, even if its script is not on the path."""

from __future__ import annotations

from farpool.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
