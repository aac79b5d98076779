"""Old name of the contract of fabrics, `farpool.net.fabric`, for plug-ins of earlier releases (docs/nixl.md)."""

from __future__ import annotations

import sys

from farpool.abc import fabric

__all__ = ["fabric"]

sys.modules["farpool.net.fabric"] = fabric
