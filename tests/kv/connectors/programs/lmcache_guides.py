"""The server's command in LMCache's guide through LMCache's own parsers, on a node.

``python -m tests.kv.connectors.programs.lmcache_guides`` prints the result.
"""

from __future__ import annotations

import argparse
import json

from lmcache.cli.commands.server import ServerCommand
from lmcache.v1.distributed.config import parse_args_to_config
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.multiprocess.config import parse_args_to_mp_server_config

from farpool.cluster.node.process import running_node
from tests.kv.connectors.programs.guides import commands


def main() -> None:
    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    (options,) = commands("kv-lmcache.md", "lmcache server")
    with running_node() as node:
        told = parser.parse_args([one.replace("tcp://127.0.0.1:7471", node.address) for one in options])
        config, server = parse_args_to_config(told), parse_args_to_mp_server_config(told)
        (adapter_config,) = config.l2_adapter_config.adapters
        adapter = create_l2_adapter(adapter_config, None)
        try:
            status = adapter.report_status()
        finally:
            adapter.close()
    print(
        json.dumps(
            {
                "adapter": type(adapter).__name__,
                "healthy": status["is_healthy"],
                "policy": config.eviction_config.eviction_policy,
                "gigabytes": told.l1_size_gb,
                "port": server.port,
            }
        )
    )


if __name__ == "__main__":
    main()
