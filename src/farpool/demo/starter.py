"""A process that reads the model's weights from their file or maps them from a node, and embeds texts.

The process reads a `StartRequest` from stdin and writes a `Started` to stdout. If `StartRequest.follow` is True, the
process waits for the next version of the weights and embeds the texts again before it writes.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import msgspec

from farpool.decoding import prepared
from farpool.demo.start_up import PROCESS_TIMEOUT_S, Started, StartRequest

if TYPE_CHECKING:
    from farpool.demo.model import Embedder


def main() -> None:
    """Read the request, prepare the model, embed the texts, and report when each step ended."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=prepared(StartRequest))
    # Both kinds of start import the same packages, so only the way to get the weights makes a difference in time.
    import torch
    import transformers.models.bert.modeling_bert  # noqa: F401

    import farpool
    from farpool.cluster.store import Store
    from farpool.demo.model import build_on, load_pretrained, with_tokenizer

    torch.set_num_threads(request.threads)
    imported = time.monotonic()
    store = Store(request.node, transport="mapped", registry=request.registry)
    if request.way == "file":
        module = load_pretrained()
        mapping = 0.0
    else:
        tensors = farpool.map_tensors(store, request.name, request.version)
        mapping = time.monotonic() - imported
        module = build_on(tensors)
    ready = time.monotonic()
    embeddings = _embed(with_tokenizer(module), request)
    answered = time.monotonic()
    later = b""
    if request.follow:
        with store.watch(request.name, after=request.version or 0) as watch:
            if watch.next(PROCESS_TIMEOUT_S):
                later = _embed(with_tokenizer(build_on(farpool.map_tensors(store, request.name))), request)
    sys.stdout.buffer.write(msgspec.json.encode(Started(imported, mapping, ready, answered, embeddings, later)))


def _embed(embedder: Embedder, request: StartRequest) -> bytes:
    import torch

    embeddings = torch.empty(len(request.texts), embedder.width)
    for batch in embedder.batches(request.texts, request.batch):
        embeddings[list(batch.rows)] = embedder.embed(batch)
    return embeddings.numpy().tobytes()


if __name__ == "__main__":
    main()
