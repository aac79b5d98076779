"""A process that starts with the model's weights, from their file or mapped from a node, and embeds texts.

Reads a `StartRequest` from stdin, writes a `Started` to stdout.
"""

from __future__ import annotations

import sys
import time

import msgspec

from farpool.demo.start_up import Started, StartRequest


def main() -> None:
    """Start as asked and say when what was ready."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=StartRequest)
    # What a program that uses the model needs in either case.
    import torch
    import transformers.models.bert.modeling_bert  # noqa: F401

    import farpool
    from farpool.demo.model import build_on, load_pretrained, with_tokenizer
    from farpool.store import Store

    torch.set_num_threads(request.threads)
    imported = time.monotonic()
    if request.way == "file":
        module = load_pretrained()
        mapping = 0.0
    else:
        store = Store(request.node, transport="mapped")
        tensors = farpool.map_tensors(store, request.name)
        mapping = time.monotonic() - imported
        module = build_on(tensors)
    ready = time.monotonic()
    embedder = with_tokenizer(module)
    embeddings = torch.empty(len(request.texts), embedder.width)
    for batch in embedder.batches(request.texts, request.batch):
        embeddings[list(batch.rows)] = embedder.embed(batch)
    started = Started(imported, mapping, ready, time.monotonic(), embeddings.numpy().tobytes())
    sys.stdout.buffer.write(msgspec.json.encode(started))


if __name__ == "__main__":
    main()
