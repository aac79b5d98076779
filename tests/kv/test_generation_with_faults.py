"""Nodes and bytes fail while a prefix is loaded, and the tokens still equal the tokens of a model without a cache."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import DynamicCache

import farpool.kv.engines.transformers_prefix
from farpool import Dram, Pool, Store
from farpool.kv import BlockCache, Layer, PrefixCache, TensorMemory
from farpool.kv.engines.transformers import FarpoolCache, prefix_blocks
from farpool.kv.engines.transformers_config import cache_argument
from tests.faults.flips import flipped
from tests.faults.forge import Forge, ForgedNode
from tests.faults.proxy import Proxy
from tests.kv import zoo
from tests.nodes import PATIENCE

STEP, SAVED, PROMPT = 8, 48, 60
"""Tokens of a block, of the prefix that is stored, and of the prompt."""
TIMEOUT = 0.25
"""Timeout of a request of the program that loads, in seconds."""
REQUESTS = 40
"""Maximum number of requests of a test: two, unless the machine is so slow that earlier ones are late."""
KEYS = "\n".join(
    f'[keys.{name}]\nsecret = "{name:x<32}"\nrights = [{rights}]\ntenant = 0'
    for name, rights in (("all", '"read", "publish"'), ("blind", '"publish"'))
)
MAGIC, HEADER = b"fpkv", 64
"""First bytes of the header before each payload, and its size."""


class Engine(Protocol):
    """A program that generates tokens."""

    def save(self, model: Any, inputs: torch.Tensor) -> int:
        """Compute the KV of a prompt and store it; return how many tokens are stored."""

    def generate(self, model: Any, inputs: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Load the stored prefix, and generate; return how many tokens were loaded, and all tokens."""


class Transformers:
    """Generation with `FarpoolCache`."""

    def __init__(self, model: Any, pool: Pool, stack: ExitStack, settings: dict[str, Any]) -> None:
        self.pool = pool
        settings = {"weights_id": "seed 5", **settings}
        self.blocks = stack.enter_context(
            prefix_blocks(model.config, settings, dtype=model.dtype, tokens_per_block=STEP)
        )

    def save(self, model: Any, inputs: torch.Tensor) -> int:
        cache = FarpoolCache(model.config, pool=self.pool, prefixes=self.blocks)
        with torch.no_grad():
            model(inputs, **{cache_argument(model): cache})
        return cache.save(inputs)

    def generate(self, model: Any, inputs: torch.Tensor) -> tuple[int, torch.Tensor]:
        cache = FarpoolCache(model.config, pool=self.pool, prefixes=self.blocks)
        loaded = cache.load(inputs, judged=False)
        assert cache.get_seq_length() == loaded
        return loaded, zoo.generate(model, inputs, cache)[0]


class Own:
    """Generation with an engine of one's own over `PrefixCache`."""

    def __init__(self, model: Any, pool: Pool, stack: ExitStack, settings: dict[str, Any], pieces: int = 1) -> None:
        self.pieces = pieces
        self.shape = (1, model.config.num_key_value_heads, PROMPT, model.config.head_dim)
        layers = [Layer(2 * self.shape[1] * self.shape[3] * 4)] * model.config.num_hidden_layers
        # No compute time is reported, so everything that is found is loaded.
        fixed: dict[str, Any] = {
            "model": "llama",
            "weights_id": "seed 5",
            "dtype": "float32",
            "block": STEP,
            "hold_out": False,
        }
        self.cache = stack.enter_context(PrefixCache(settings.pop("nodes"), layers, pieces=pieces, **fixed, **settings))

    def save(self, model: Any, inputs: torch.Tensor) -> int:
        cache: Any = DynamicCache(config=model.config)
        with torch.no_grad():
            model(inputs, **{cache_argument(model): cache})
        self.cache.save(inputs[0].tolist(), TensorMemory([(layer.keys, layer.values) for layer in cache.layers]))
        return self.cache.lookup(inputs[0].tolist(), leave=0).tokens

    def generate(self, model: Any, inputs: torch.Tensor) -> tuple[int, torch.Tensor]:
        match = self.cache.lookup(inputs[0].tolist())
        # Memory that was not loaded must not be used: such numbers would be visible in every logit.
        pairs = [tuple(torch.full(self.shape, torch.nan) for _ in "kv") for _ in range(model.config.num_hidden_layers)]
        if self.pieces == 1:
            loaded = self.cache.load(match, TensorMemory(pairs))
        else:
            parts = self.cache.load_parts(match, TensorMemory(pairs))
            loaded = min(part.tokens.result(PATIENCE) for part in parts)
        cache = DynamicCache(config=model.config)
        for number, (keys, values) in enumerate(pairs):
            if loaded:
                cache.update(keys[:, :, :loaded], values[:, :, :loaded], number)
        return loaded, zoo.generate(model, inputs, cache)[0]


ENGINES: dict[str, tuple[str, Callable[..., Engine]]] = {
    "FarpoolCache": ("llama", Transformers),
    "FarpoolCache with sliding layers": ("gemma2", Transformers),
    "PrefixCache": ("llama", Own),
    "PrefixCache by layers": ("llama", partial(Own, pieces=3)),
}


class Gate(Proxy):
    """A way to a node on which something happens to the bytes that come from some moment on.

    Attributes
    ----------
    happens : callable or None
        It receives the bytes that pass, and returns the bytes that arrive in their place.
    """

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.happens: Callable[[bytes], bytes] | None = None
        self.over = threading.Event()

    def _passed(self, data: bytes) -> bytes:
        return data if self.happens is None else self.happens(data)


class Scene:
    """A node in which a prefix is stored, and the connection of the program that loads.

    Attributes
    ----------
    struck : int
        How often something was done.
    """

    def __init__(self, node: ForgedNode, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node, self.gate = node, gate
        self.monkeypatch = monkeypatch
        self.key = "all"
        self.struck = 0

    def kill(self) -> None:
        self.node.kill()
        self.struck += 1

    def stop(self) -> None:
        self.node.stop()
        self.struck += 1

    def refuse(self) -> None:
        self.key = "blind"
        self.struck += 1

    def corrupt(self, numbers: range = range(1000)) -> None:
        """Flip a bit in payloads of these numbers, in their order in the node's memory."""
        (path,) = self.node.folder.glob("objects-0.data")
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            at = memory.find(MAGIC)
            for number in itertools.count():
                if at < 0:
                    break
                if number in numbers:
                    memory[at + HEADER + 100] ^= 1 << number % 8
                    self.struck += 1
                at = memory.find(MAGIC, at + HEADER)

    def drop(self) -> None:
        """Remove all blocks, like eviction."""
        with Store(self.node.address, key=f"all:{'all':x<32}", timeout=PATIENCE) as store:
            for key in list(store.keys()):
                self.struck += store.drop(key)

    def at_load(self, strike: Callable[[], None], call: int = 0) -> None:
        """Strike when blocks are loaded that were found before, at the call of this number."""
        load, calls = BlockCache.load, itertools.count()

        def struck(cache: BlockCache, *args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                strike()
            return load(cache, *args, **kwargs)

        self.monkeypatch.setattr(BlockCache, "load", struck)

    def after_bytes(self, nbytes: int, strike: Callable[[], object]) -> None:
        """Strike when so many bytes have come since blocks began to be loaded; the rest of them does not come."""
        left = nbytes

        def happens(data: bytes) -> bytes:
            nonlocal left
            arrived, left = data[:left], left - len(data)
            if left <= 0:
                left = 0
                self.gate.happens = None
                self.struck += 1
                strike()
            return arrived

        self.at_load(lambda: setattr(self.gate, "happens", happens))

    def flip_all(self) -> None:
        """Flip a bit in every message with payloads."""

        def happens(data: bytes) -> bytes:
            if len(data) < 1000:
                return data
            self.struck += 1
            return flipped(data, [8 * (len(data) // 2)])

        self.at_load(lambda: setattr(self.gate, "happens", happens))


def one_block_at_a_time(scene: Scene) -> None:
    scene.monkeypatch.setattr(farpool.kv.engines.transformers_prefix, "_BATCH_BYTES_MAX", 1)


def kill_while_mapped_blocks_are_read(scene: Scene) -> None:
    one_block_at_a_time(scene)
    scene.at_load(scene.kill, call=1)


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[Scene], None], int]] = {
    "all blocks corrupt": (("mapped", "tcp"), lambda scene: scene.corrupt(), 0),
    "one block corrupt": (("mapped", "tcp"), lambda scene: scene.corrupt(range(3, 4)), SAVED - STEP),
    "late from the first request on": (("tcp",), lambda scene: scene.stop(), 0),
    "late in the middle of a load": (
        ("tcp",), lambda scene: scene.after_bytes(5000, lambda: scene.gate.over.wait(PATIENCE)), SAVED - STEP,
    ),
    "refused": (("mapped", "tcp"), lambda scene: scene.refuse(), 0),
    "killed before": (("mapped", "tcp"), lambda scene: scene.kill(), 0),
    "killed when the load begins": (("mapped", "tcp"), lambda scene: scene.at_load(scene.kill), SAVED),
    "killed in the middle of a load": (("tcp",), lambda scene: scene.after_bytes(5000, scene.node.kill), SAVED - STEP),
    "killed while mapped blocks are read": (("mapped",), kill_while_mapped_blocks_are_read, SAVED),
    "dropped when the load begins": (("mapped", "tcp"), lambda scene: scene.at_load(scene.drop), 0),
    "flipped on the way": (("tcp",), lambda scene: scene.flip_all(), SAVED - STEP),
}  # fmt: skip
"""By name: the transports, the fault, and the maximum number of tokens that can be loaded."""


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge() as forge:
        yield forge


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: zoo.make(name) for name, _ in ENGINES.values()}


@pytest.fixture(scope="module")
def expected(models: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tokens that each model generates without a cache of prefixes."""
    inputs = zoo.prompt(PROMPT)
    return {name: zoo.generate(model, inputs, DynamicCache(config=model.config))[0] for name, model in models.items()}


@pytest.mark.parametrize(
    ("fault", "transport"), [(name, one) for name, (transports, _, _) in FAULTS.items() for one in transports]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_equal_a_run_without_a_cache_when_loads_fail(
    forge: Forge,
    models: dict[str, Any],
    expected: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    engine: str,
    fault: str,
    transport: str,
) -> None:
    name, make = ENGINES[engine]
    model, inputs = models[name], zoo.prompt(PROMPT)
    _, strike, most = FAULTS[fault]
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    with ExitStack() as stack:
        node = forge.node(keys=keys)
        stack.callback(node.kill)
        gate = stack.enter_context(Gate(node.address))
        stack.callback(gate.over.set)
        pool = stack.enter_context(Pool("16KiB", [Dram("8MiB")]))

        def made(key: str, timeout: float, address: str) -> Engine:
            settings = {"nodes": [address], "access_key": f"{key}:{key:x<32}", "timeout": timeout}
            return make(model, pool, stack, {**settings, "transport": transport})

        assert made("all", PATIENCE, node.address).save(model, inputs[:, :SAVED]) == SAVED
        scene = Scene(node, gate, monkeypatch)
        address = gate.address if transport == "tcp" else node.address
        # It is connected before anything happens.
        loader = made("blind" if fault == "refused" else "all", TIMEOUT, address)
        loader.generate(model, zoo.prompt(PROMPT, seed=9))
        strike(scene)
        for turn in range(REQUESTS):
            loaded, found = loader.generate(model, inputs)
            assert torch.equal(found, expected[name])
            assert loaded % STEP == 0
            assert loaded <= most
            if turn and scene.struck:
                break
        assert scene.struck > 0


@pytest.mark.parametrize("transport", ["mapped", "tcp"])
@pytest.mark.parametrize("engine", ENGINES)
def test_all_is_loaded_when_nothing_happens(
    forge: Forge,
    models: dict[str, Any],
    expected: dict[str, torch.Tensor],
    engine: str,
    transport: str,
) -> None:
    name, make = ENGINES[engine]
    model, inputs = models[name], zoo.prompt(PROMPT)
    with ExitStack() as stack:
        node = forge.node()
        stack.callback(node.kill)
        gate = stack.enter_context(Gate(node.address))
        pool = stack.enter_context(Pool("16KiB", [Dram("8MiB")]))
        given = {"nodes": [gate.address if transport == "tcp" else node.address], "timeout": PATIENCE}
        one, other = (make(model, pool, stack, {**given, "transport": transport}) for _ in "12")
        assert one.save(model, inputs[:, :SAVED]) == SAVED
        loaded, found = other.generate(model, inputs)
        assert loaded == SAVED
        assert torch.equal(found, expected[name])
