"""The parts of gpu_check.py that generate text: decode, experts and cache.

Models are made from configurations, by seed. Each part first generates with everything resident on the device, and then
the same tokens in a pool, greedily. All tokens must be equal.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_run import Run, fetched, link_rate

from farpool import Pool, offload
from farpool.kv import FarpoolCache
from farpool.kv.engines.transformers_config import cache_argument

SETTLE = 3
"""Number of tokens before times are taken, in which the pool learns the order of accesses."""
CHUNK = 4096
"""Tokens of a prompt that are computed at once."""
EXPERTS = ("grouped_mm", "batched_mm", "eager")


@dataclass
class Tokens:
    """What a generation gave: the tokens, the seconds of each after the first ones, and the bytes moved for each."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    moved: int = 0

    @property
    def median(self) -> float:
        """Median of the seconds of a token."""
        return statistics.median(self.seconds)


def build(run: Run, name: str, **config: Any) -> Any:
    """Make a model of a class of transformers on the device, with weights by seed in bf16."""
    import transformers

    made = getattr(transformers, f"{name}Config")(**config, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(run.device):
            return getattr(transformers, f"{name}ForCausalLM")(made).eval()
    finally:
        torch.set_default_dtype(before)


def generate(run: Run, model: Any, prompt: torch.Tensor, count: int, cache: Any, pool: Pool | None = None) -> Tokens:
    """Generate `count` tokens after a prompt, and time all but the first `SETTLE` of them."""
    found = Tokens()
    argument = cache_argument(model)
    before = 0
    with torch.no_grad():
        for chunk in prompt.split(CHUNK, dim=1):
            logits = model(chunk, use_cache=True, logits_to_keep=1, **{argument: cache}).logits
        for number in range(SETTLE + count):
            token = logits[:, -1:].argmax(-1)
            found.tokens.append(int(token))
            if number == SETTLE and pool is not None:
                before = fetched(pool)
            start = time.perf_counter()
            logits = model(token, use_cache=True, **{argument: cache}).logits
            run.synchronize()
            if number >= SETTLE:
                found.seconds.append(time.perf_counter() - start)
        if pool is not None:
            found.moved = (fetched(pool) - before) // count
    return found


def dynamic_cache(model: Any) -> Any:
    """The cache of transformers that keeps keys and values where they are computed."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def prompt_of(run: Run, model: Any, tokens: int) -> torch.Tensor:
    """A prompt of random tokens, by seed."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, model.config.vocab_size, (1, tokens), generator=generator).to(run.device)


def nbytes_of(model: Any, *names: str) -> int:
    """Bytes of the parameters whose names contain one of these; of all without names."""
    return sum(p.nbytes for name, p in model.named_parameters() if not names or any(one in name for one in names))


@contextmanager
def pooled(run: Run, model: Any, fast: int) -> Iterator[Pool]:
    """A pool with the weights of a model; its DRAM tier holds all of them."""
    with Pool(fast, dram=nbytes_of(model) * 9 // 8 + (64 << 20), device=run.device) as pool:
        start = time.perf_counter()
        offload(model, pool)
        if run.device == "cuda":
            torch.cuda.empty_cache()
        run.add("offload", seconds=time.perf_counter() - start, weight_bytes=nbytes_of(model), fast_bytes=pool.fast)
        yield pool
        print(pool.explain(), flush=True)
        # The weights are not needed any more, and have no room outside the pool.
        model.to_empty(device="meta")
        gc.collect()
        if pool.live:
            raise SystemExit(f"{pool.live} storages of the model live on in the pool")


def require_equal(found: dict[str, tuple[Tokens, Tokens]]) -> None:
    """Raise SystemExit unless each two generations have the same tokens; called when all figures have been added."""
    differing = [
        f"{name}: tokens {ours.tokens} differ from the resident ones, {resident.tokens}"
        for name, (ours, resident) in found.items()
        if ours.tokens != resident.tokens
    ]
    if differing:
        raise SystemExit("\n".join(differing))


def layers_that_fit(run: Run, wanted: int, nbytes: int) -> int:
    """So many of `wanted` layers of `nbytes` bytes each that the model and a pool fit into 70 % of a GPU's memory."""
    if run.device == "cpu":
        return wanted
    free, _ = torch.cuda.mem_get_info()
    return max(2, min(wanted, int(free * 0.7 / nbytes / (1 + 8 / 30))))


def decode(run: Run) -> None:
    """A language model of 30 GB in bf16, 8 GB of them fast: the time of a token, against what the link allows."""
    if run.quick:
        sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
        layers, count = 12, 4
    else:
        sizes = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_key_value_heads": 8}
        layers, count = layers_that_fit(run, 53, 550_000_000), 8
    model = build(run, "Llama", vocab_size=512 if run.quick else 32000, num_hidden_layers=layers, **sizes)
    prompt = prompt_of(run, model, 32)
    weights = nbytes_of(model)
    # Of the table of words a token reads one row.
    needed, fast, rate = weights - nbytes_of(model, "embed_tokens"), weights * 8 // 30, link_rate(run)
    resident = generate(run, model, prompt, count, dynamic_cache(model))
    run.add("resident", weight_bytes=weights, layers=layers, seconds=resident.median, link_bytes_per_second=rate)
    with pooled(run, model, fast) as pool:
        found = generate(run, model, prompt, count, dynamic_cache(model), pool)
        fewest = max(0, needed - pool.fast)
        limit = max(resident.median, fewest / rate)
        run.add(
            "farpool",
            seconds=found.median,
            efficiency=limit / found.median,
            moved_bytes=found.moved,
            fewest_bytes=fewest,
            gb_per_second=found.moved / found.median / 1e9,
            peak_bytes=pool.stats().fast.peak,
            equal=found.tokens == resident.tokens,
        )
    require_equal({"decode": (found, resident)})


def experts(run: Run) -> None:
    """A mixture of Mixtral's shape, of 8 experts 2 for a token: how many bytes move, by implementation of experts."""
    if run.quick:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        layers, count = 4, 4
    else:
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
        layers, count = layers_that_fit(run, 8, 2_900_000_000), 12
    shape = {"vocab_size": 512 if run.quick else 32000, "num_hidden_layers": layers, **sizes}
    model = build(run, "Mixtral", num_local_experts=8, num_experts_per_tok=2, **shape)
    prompt = prompt_of(run, model, 8)
    weights, of_experts = nbytes_of(model), nbytes_of(model, "experts")
    routed = of_experts * 2 // 8
    resident: dict[str, Tokens] = {}
    pairs: dict[str, tuple[Tokens, Tokens]] = {}
    for name in EXPERTS:
        try:
            model.set_experts_implementation(name)
            resident[name] = generate(run, model, prompt, count, dynamic_cache(model))
        except Exception as error:  # an implementation that cannot run on this device without a pool, either
            run.add("resident", implementation=name, why=f"{type(error).__name__}: {error}")
        else:
            run.add("resident", implementation=name, seconds=resident[name].median, weight_bytes=weights)
    if not resident:
        raise SystemExit("no implementation of experts runs here without a pool")
    with pooled(run, model, weights - of_experts + of_experts // 5) as pool:
        for name, expected in resident.items():
            model.set_experts_implementation(name)
            found = generate(run, model, prompt, count, dynamic_cache(model), pool)
            run.add(
                "farpool",
                implementation=name,
                seconds=found.median,
                of_resident=expected.median / found.median,
                moved_bytes=found.moved,
                routed_bytes=routed,
                moved_of_routed=found.moved / routed,
                equal=found.tokens == expected.tokens,
            )
            pairs[name] = found, expected
    require_equal(pairs)


def cache(run: Run) -> None:
    """A long context, a quarter of whose keys and values is fast: FarpoolCache against DynamicCache."""
    if run.quick:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
        layers, context, count = 8, 1024, 4
    else:
        sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}
        layers, context, count = 32, 32768, 8
    shape = {"vocab_size": 512 if run.quick else 32000, "max_position_embeddings": 2 * context, **sizes}
    model = build(run, "Llama", num_hidden_layers=layers, **shape)
    prompt = prompt_of(run, model, context)
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    kv_bytes = layers * 2 * sizes["num_key_value_heads"] * head * context * model.dtype.itemsize
    fast, rate = kv_bytes // 4, link_rate(run)
    resident = generate(run, model, prompt, count, dynamic_cache(model))
    run.add("DynamicCache", seconds=resident.median, kv_bytes=kv_bytes, context=context, link_bytes_per_second=rate)
    pairs: dict[str, tuple[Tokens, Tokens]] = {}
    _offloaded(run, model, prompt, count, resident)
    for name, prefetch in {"FarpoolCache": True, "FarpoolCache without prefetching": False}.items():
        with Pool(fast, dram=2 * kv_bytes, device=run.device, prefetch=prefetch) as pool:
            caches = [FarpoolCache(model.config, pool=pool)]
            found = generate(run, model, prompt, count, caches[0], pool)
            fewest = kv_bytes - fast
            run.add(
                name,
                seconds=found.median,
                efficiency=max(resident.median, fewest / rate) / found.median,
                moved_bytes=found.moved,
                fewest_bytes=fewest,
                fast_bytes=fast,
                equal=found.tokens == resident.tokens,
            )
            pairs[name] = found, resident
            print(pool.explain(), flush=True)
            caches.clear()  # the cache must not outlive the pool
    require_equal(pairs)


def _offloaded(run: Run, model: Any, prompt: torch.Tensor, count: int, expected: Tokens) -> None:
    """The cache of transformers that keeps keys and values in host memory, as a rival."""
    from transformers import DynamicCache

    name = "DynamicCache, offloading"
    if run.device == "cpu":
        run.add(name, seconds=None, why="needs a GPU")
        return
    try:
        found = generate(run, model, prompt, count, DynamicCache(config=model.config, offloading=True))
    except Exception as error:  # a rival that fails is no failure of farpool
        run.add(name, seconds=None, why=f"{type(error).__name__}: {error}")
        return
    run.add(name, seconds=found.median, equal=found.tokens == expected.tokens)
