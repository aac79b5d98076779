"""A process that publishes the model's weights into a node's store.

Reads a `PublishRequest` from stdin, writes a `Published` to stdout.
"""

from __future__ import annotations

import sys
import time

import msgspec

import farpool
from farpool.demo.model import all_tensors, load_embedder
from farpool.demo.start_up import Published, PublishRequest
from farpool.store import Store


def main() -> None:
    """Publish and say how much that was."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=PublishRequest)
    import transformers.models.bert.modeling_bert  # noqa: F401 - so that loading is timed without it

    begin = time.monotonic()
    tensors = all_tensors(load_embedder().module)
    loaded = time.monotonic()
    with Store(request.node) as store:
        start = time.monotonic()
        farpool.publish_tensors(store, request.name, tensors)
        seconds = time.monotonic() - start
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    published = Published(len(tensors), nbytes, loaded - begin, seconds)
    sys.stdout.buffer.write(msgspec.json.encode(published))


if __name__ == "__main__":
    main()
