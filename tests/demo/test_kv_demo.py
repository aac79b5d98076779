"""``farpool demo --kv``: it passes only if the second process has loaded what the first one saved."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.demo import shared_context
from farpool.kv.keys import KEY_MAGIC
from tests.cli.here import command
from tests.nodes import PATIENCE

# Each run starts two processes that import torch and transformers.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_second_process_answers_from_kv_of_the_first(tmp_path: Path) -> None:
    done = command("demo", "--kv", "--context", "100", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    outcome = said["result"]
    assert outcome["equal"]
    assert (outcome["context_tokens"], outcome["whole_tokens"], outcome["loaded_tokens"]) == (100, 96, 96)
    assert outcome["missed"] == ""
    assert outcome["nbytes"] > 0
    assert len(outcome["computed"]) == len(outcome["loaded"]) == len(outcome["loading"]) == len(outcome["questions"])
    assert said["provenance"]["command"]


def _emptied(node: RunningNode) -> None:
    with Store(node.address, timeout=PATIENCE) as store:
        for key in list(store.keys(KEY_MAGIC)):
            store.drop(key)


@pytest.mark.parametrize(("fault", "reason"), [(_emptied, "absent"), (RunningNode.kill, "node_away")])
def test_a_demo_that_loads_nothing_fails(
    fault: Callable[[RunningNode], None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = shared_context._ask
    with running_node() as node:

        @contextlib.contextmanager
        def lending(count: int, nbytes: int) -> Iterator[tuple[str, ...]]:
            yield (node.address,)

        def broken(request: shared_context.ContextRequest, step: str) -> shared_context.ContextReply:
            if not request.saves:
                fault(node)
            return ask(request, step)

        monkeypatch.setattr(shared_context, "lending", lending)
        monkeypatch.setattr(shared_context, "_ask", broken)
        done = command("demo", "--kv", "--context", "100", cwd=tmp_path)
    said = " ".join(done.stdout.replace("│", " ").split())
    assert done.returncode == 1
    assert "equal both processes give the same tokens" in said  # it computed what it could not load
    assert f"NOT REUSED 0 of 100 tokens of context were loaded, expected 96; the others were computed: {reason}" in said
