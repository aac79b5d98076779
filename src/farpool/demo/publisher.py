"""Process that publishes the model's weights under a name; it may change them first (`tune`).

It reads a `PublishRequest` from stdin and writes a `Published` to stdout.
"""

from __future__ import annotations

import sys
import time

import msgspec

from farpool.cluster.store import Store
from farpool.decoding import prepared
from farpool.demo.model import all_tensors, load_embedder, tune
from farpool.demo.start_up import Published, PublishRequest


def main() -> None:
    """Publish the weights; report the number of tensors, their bytes, and how long loading and publishing took."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=prepared(PublishRequest))
    import transformers.models.bert.modeling_bert  # noqa: F401 - here, so that the time of loading excludes it

    begin = time.monotonic()
    module = load_embedder().module
    if request.tuned:
        tune(module)
    loaded = time.monotonic()
    tensors = all_tensors(module)
    with Store(request.node, registry=request.registry) as store:
        start = time.monotonic()
        info = store.publish(request.name, tensors)
        seconds = time.monotonic() - start
    published = Published(info.version, len(tensors), info.nbytes, loaded - begin, seconds)
    sys.stdout.buffer.write(msgspec.json.encode(published))


if __name__ == "__main__":
    main()
