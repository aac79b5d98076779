"""The blocks in which prefixes of a transformers model are stored.

A model has one namespace. Its layers form groups, and each group has blocks of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from farpool.errors import ConfigError, UnsupportedError
from farpool.kv.blocks import BlockCache
from farpool.kv.engines.transformers_config import check_prefixes, config_of, dtype_of
from farpool.kv.namespace import Group, Namespace
from farpool.kv.probe import Probe
from farpool.kv.settings import CacheSettings

__all__ = ["ENGINE", "FULL", "LAYOUT", "SLIDING", "name_of", "pieces_of", "prefix_blocks", "probe_of"]

ENGINE = "transformers"
FULL, SLIDING = "full", "sliding"
"""The two kinds of groups of layers. A model has at most one group of each kind."""
LAYOUT = "lshtd"
"""Axes of payloads: layers, keys and values, heads, tokens, elements. The state of a layer with a sliding window is cut
into pieces. Each piece has as many tokens as a block, and is stored as if it were a layer."""
_SETTINGS_WITHOUT_EFFECT = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
"""Settings in a model's configuration that do not change its keys and values."""


def prefix_blocks(
    model: Any,
    settings: CacheSettings | Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    tokens_per_block: int = 64,
) -> BlockCache:
    """Make the `BlockCache` that stores the prefixes of a model. One `BlockCache` can serve every `FarpoolCache`.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
        The model, or its configuration.
    settings : CacheSettings or mapping
        The settings, among them the nodes and ``weights_id``. ``weights_id`` is the exact name of the model's weights,
        including all adapters.
    dtype : torch.dtype, optional
        Data type of the keys and values. By default, the data type that the model or its configuration states.
    tokens_per_block : int
        Number of tokens in a block. Prefixes are stored and found in whole blocks.

    Raises
    ------
    ConfigError
        A setting is wrong, or the data type is not known.
    UnsupportedError
        - The model has layers whose state cannot be stored, such as recurrent layers.
        - The model's keys and values depend on later tokens, for example because its rotary embedding has the type
          ``longrope`` or ``dynamic``.
    """
    if not isinstance(settings, CacheSettings):
        settings = CacheSettings.of(settings, "prefix_blocks")
    config, dtype = config_of(model), dtype or dtype_of(model)
    if dtype is None:
        raise ConfigError(
            "prefix_blocks: the configuration does not name the dtype of keys and values: give the model itself, or "
            "dtype=model.dtype",
            setting="dtype",
        )
    check_prefixes(config)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    described = {name: value for name, value in config.to_dict().items() if name not in _SETTINGS_WITHOUT_EFFECT}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    namespace = Namespace(
        engine=ENGINE,
        model=config.model_type,
        weights=settings.weights_id,
        dtype=name_of(dtype),
        layout=LAYOUT,
        tokens_per_block=tokens_per_block,
        groups=_groups(config, tokens_per_block, 2 * heads * width * dtype.itemsize),
        heads=heads,
        head_dim=width,
        tenant=settings.tenant,
        codec=settings.codec,
        extra=(("config", digest),),
    )
    blocks = settings.cache(namespace)
    probe_of(blocks)
    return blocks


def _groups(config: Any, tokens_per_block: int, token_bytes: int) -> tuple[Group, ...]:
    """Return a group of the layers with full attention and a group of the layers with a sliding window.

    A group without layers is left out.

    Raises
    ------
    UnsupportedError
        The model has layers of another kind.
    """
    full, sliding, windows = [], [], []
    pieces = 0
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicLayer:
            full.append(str(number))
        elif type(layer) is DynamicSlidingWindowLayer:
            sliding.append(str(number))
            windows.append(layer.sliding_window)
            pieces += pieces_of(layer, tokens_per_block)
        elif type(layer) is not DummyLayer:
            raise UnsupportedError(
                f"layer {number}: the state of a {type(layer).__name__} cannot be stored as part of a prefix; use "
                "FarpoolCache without prefixes"
            )
    groups = []
    if full:
        groups.append(Group(tuple(full), len(full) * tokens_per_block * token_bytes))
    if sliding:
        groups.append(Group(tuple(sliding), pieces * tokens_per_block * token_bytes, "sliding", max(windows)))
    return tuple(groups)


def probe_of(prefixes: BlockCache) -> Probe:
    """Return the probe that every `FarpoolCache` with these prefixes shares."""
    return Probe.of(prefixes, "FarpoolCache")


def pieces_of(layer: DynamicSlidingWindowLayer, tokens_per_block: int) -> int:
    """Return the number of pieces, each of `tokens_per_block` tokens, into which the state of a layer is cut."""
    return -(-(layer.sliding_window - 1) // tokens_per_block)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a data type without the prefix ``torch.``."""
    return str(dtype).removeprefix("torch.")
