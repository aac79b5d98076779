"""After a prefix was reused, the target accepted no more tokens of its drafter: the drafter had got other KV.

The drafter here has the weights of the target, so that the target accepts each of its tokens if its KV is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from farpool import Dram, Pool
from farpool.cluster.node.process import RunningNode, running_node
from tests.kv import zoo
from tests.kv.test_generation_with_faults import PROMPT, SAVED, Transformers
from tests.nodes import PATIENCE


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as one:
        yield one


def other_model() -> Any:
    """A model of the target's shape with other weights."""
    model = zoo.make("llama")
    torch.manual_seed(23)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    return model


def accepted(node: RunningNode, drafters: str, others: str, seed: int) -> tuple[int, int]:
    """Save a prefix with another model, then with the drafter; return tokens that the drafter loads, and accepted ones.

    `drafters` and `others` are the names of the two models' weights.
    """
    drafter, inputs = zoo.make("llama"), zoo.prompt(PROMPT, seed=seed)
    target, _ = zoo.generate(drafter, inputs, None)
    with ExitStack() as stack:
        pool = stack.enter_context(Pool("64KiB", [Dram("64MiB")]))
        settings = {"nodes": [node.address], "timeout": PATIENCE}
        for model, weights in ((other_model(), others), (drafter, drafters)):
            engine = Transformers(model, pool, stack, {**settings, "weights_id": weights})
            engine.save(model, inputs[:, :SAVED])
        loaded, drafted = engine.generate(drafter, inputs)
    return loaded, int((drafted[0, PROMPT:] == target[0, PROMPT:]).sum())


def test_a_drafter_is_accepted_as_before_after_its_prefix_was_reused(node: RunningNode) -> None:
    assert accepted(node, "drafter", "other", seed=31) == (SAVED, 12)


def test_with_the_kv_of_another_model_it_would_not_be(node: RunningNode) -> None:
    loaded, tokens = accepted(node, "the same name", "the same name", seed=32)
    assert loaded == SAVED
    assert tokens < 6
