"""Run a module or a program as a release after this one would: with a feature of the protocol that this one lacks.

The environment variable ``LATER_REQUIRED_BY`` says which side of a later release cannot work without the feature:
``client``, ``node``, or empty for none.
"""

from __future__ import annotations

import os
import runpy
import sys

from farpool.cluster.wire.features import FEATURES, Feature, Features
from farpool.cluster.wire.handshake import ClientHandshake, NodeHandshake

required_by = os.environ.get("LATER_REQUIRED_BY", "")
later = Features(
    [
        *FEATURES,
        Feature(40, "later", "9.0", client_requires=required_by == "client", node_requires=required_by == "node"),
    ]
)
for half in (ClientHandshake, NodeHandshake):
    defaults = half.__init__.__kwdefaults__
    assert "features" in defaults
    defaults["features"] = later

# What follows are Python's own arguments: -m MODULE ..., or -I PROGRAM.
sys.argv = sys.argv[2:]
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
