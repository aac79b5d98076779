"""The contract of all connectors: cases by name, and the facts that each one has to find.

A connector's program implements each case as a function of its name, on real nodes that it starts, and prints the facts
that the functions return as JSON. A fact that is named here must be equal; further ones are the program's own.

A case has 16 blocks (`BLOCKS`) with different bytes, made by a seed.

saved
    Blocks that are on the nodes when the case has saved.
found
    Blocks that the lookup under test reported to the engine as found.
loaded
    Blocks that the connector reported as loaded.
wrong
    Blocks that were reported as loaded, but whose bytes in the engine's memory differ from the saved ones.
completed
    True if the engine finished the request, or the shutdown, within the case's time.
"""

from __future__ import annotations

from typing import Any

BLOCKS = 16

CASES: dict[str, dict[str, Any]] = {
    # All blocks are saved, leave the engine's memory, and are loaded into other places of it.
    "round_trip": {"saved": 16, "found": 16, "loaded": 16, "wrong": 0},
    # Half of the blocks that a request asks for were saved, the first 8.
    "partial_batch": {"saved": 8, "found": 8, "loaded": 8, "wrong": 0},
    "unknown_keys": {"saved": 0, "found": 0, "loaded": 0, "wrong": 0},
    # Values of another size are stored under the same keys.
    "wrong_size": {"loaded": 0, "wrong": 0, "completed": True},
    # Saved by a connector with the same settings but another dtype of the same width; with another weights id.
    "other_dtype": {"saved": 16, "found": 0, "loaded": 0, "wrong": 0},
    "other_weights": {"saved": 16, "found": 0, "loaded": 0, "wrong": 0},
    # The node is killed between the lookup, which found all, and the end of the load.
    "node_killed_during_load": {"saved": 16, "found": 16, "wrong": 0, "completed": True},
    # The node is stopped (SIGSTOP) between lookup and load until the connector's deadline has passed; then it
    # continues, and a new request asks for the same blocks: `later`. Nothing may write the engine's memory after the
    # load was reported as failed: `late_writes` counts blocks of the failed load whose memory changed afterwards.
    "deadline_passed": {"saved": 16, "loaded": 0, "wrong": 0, "completed": True, "later": 16, "late_writes": 0},
    # Lookups find everything and each load fails: the payloads are damaged on the node, or on the way.
    "all_loads_fail": {"saved": 16, "found": 16, "loaded": 0, "wrong": 0, "completed": True},
    # The engine offers saved blocks again: bytes of payloads that the nodes received for that.
    "offered_again": {"saved": 16, "bytes_again": 0},
    # Shut down while saves and loads are under way: threads of the connector that are left, and buffers still held.
    "shutdown_with_jobs_in_flight": {"completed": True, "threads_left": 0, "views_left": 0},
    # A connector that has been used is used again in a forked child, or a new one is made there.
    "fork": {"saved": 16, "loaded": 16, "wrong": 0},
    # Several threads save and load 16 blocks each at the same time; 4 threads.
    "concurrent_threads": {"saved": 64, "loaded": 64, "wrong": 0},
    # Facts of processes with different PYTHONHASHSEED are compared: "keys" (the first two blocks' 64-byte keys in hex,
    # for a fixed namespace) and "vectors" (the engine's own hashes of the published tokens in hex).
    "hash_seeds": {},
}

OF_ENGINES: dict[str, dict[str, Any]] = {
    # 8 requests compute 16 blocks each, and load them when they come again, which takes ten times as long, by a clock
    # that only computing and loading move. Then 4 of them come once more: `bypassed` of their blocks are there and not
    # loaded, which the journal says for `told` of these requests; the engine computes them, and offers them again.
    "slow_link_is_bypassed": {"loaded": 128, "bypassed": 64, "told": 4, "wrong": 0, "completed": True},
    # The same with `hold_out` turned off.
    "hold_out_off": {"loaded": 192, "bypassed": 0, "told": 0, "wrong": 0, "completed": True},
    # 9 requests compute 16 blocks each, a second for each block by that clock. Nodes receive this cost with the last
    # request's blocks, and no cost with the first request's, because nothing was measured before.
    "nodes_are_told_the_cost": {"first": [0.0], "last": [1.0]},
}
"""Cases of engines that do not report their compute time to a connector."""

MEMORY = 10
"""Blocks that fit into the host memory of an engine whose memory is smaller than a prefix."""

OF_HOST_MEMORY: dict[str, dict[str, Any]] = {
    # The prefix has 16 blocks, and the engine's host memory has room for 10. The request ends, and the engine has asked
    # for no block twice: `asked` is at most 16. An engine that evicts a block of a request to make room for another one
    # of the same request, and then asks for the first one again, might do so forever.
    "memory_smaller_than_prefix": {"saved": 16, "wrong": 0, "completed": True},
    # The blocks were saved by another release of the engine, which may order the bytes of a block differently.
    "other_release": {"saved": 16, "found": 0, "loaded": 0, "wrong": 0},
    # A node has all blocks, and each block is damaged in the engine's memory after it was verified. The connector finds
    # that out by its probe when it starts: it finds nothing, and saves none of the blocks that the engine offers.
    "damaged_in_host_memory": {"saved": 16, "found": 0, "loaded": 0, "wrong": 0, "completed": True},
}
"""Cases of engines through whose host memory blocks travel."""
