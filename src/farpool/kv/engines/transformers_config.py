"""Checks whether the keys and values of a transformers model depend only on the tokens before them.

A prefix is found by its tokens alone, so the same tokens must always give the same keys and values. If the model also
sees images or sounds, the same tokens may give other keys and values, so the caller has to name the contents of these
inputs (`inputs_beside_tokens`). A model is refused (`check_prefixes`) if the frequencies of its rotary embedding depend
on the length of the whole prompt, if its tokens see later tokens, or if positions follow the shapes of images. Types of
rotary embedding that are not known to be safe are refused, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from farpool.errors import UnsupportedError

__all__ = ["cache_argument", "check_prefixes", "config_of", "dtype_of", "inputs_beside_tokens", "left_padding"]

_ROTARY = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Types of rotary embedding whose frequencies are the same for prompts of all lengths."""
_SENSES = ("audio", "image", "speech", "video", "vision", "visual")
"""A setting whose name contains one of these words shows that the model has inputs other than tokens."""
_WITHOUT_INPUTS = frozenset({"attn_config", "ffn_config"})
"""Nested configurations that describe layers, so they do not show that the model has inputs other than tokens."""


def config_of(model: Any) -> Any:
    """Return the configuration of a model. If the argument is a configuration, return the argument."""
    return model.config if isinstance(model, torch.nn.Module) else model


def cache_argument(model: torch.nn.Module) -> str:
    """Return the name of a model's argument for its cache. Transformers 5.24 has renamed this argument."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def dtype_of(model: Any) -> torch.dtype | None:
    """Return the data type that a model or a configuration states for keys and values; None if it states none."""
    found = model.dtype if isinstance(model, torch.nn.Module) else model.get_text_config(decoder=True).dtype
    return found if isinstance(found, torch.dtype) else None


def left_padding(config: Any) -> int | None:
    """Return the padding token, or None if a prompt without padding may also begin with this token."""
    text = config.get_text_config(decoder=True)
    padding, first, ends = (getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos"))
    others = (first, *ends) if isinstance(ends, list) else (first, ends)
    return None if padding in others else padding


def inputs_beside_tokens(config: Any) -> str:
    """Return the names of the settings which show that keys and values depend on more than tokens, joined by commas.

    The result is empty if the configuration has no such settings.
    """
    described = config.to_dict()
    names = [name for name in config.sub_configs if name not in _WITHOUT_INPUTS]
    names += [name for name in described if any(sense in name for sense in _SENSES)]
    names += [name for name in ("is_encoder_decoder", "add_cross_attention") if described.get(name)]
    return ", ".join(dict.fromkeys(names))


def check_prefixes(config: Any) -> None:
    """Check that the keys and values of a prefix do not depend on later tokens or on the shapes of images.

    Raises
    ------
    UnsupportedError
        The keys or values of a prefix depend on later tokens or on the shapes of images, or may depend on them.
    """
    described = config.to_dict()
    text = config.get_text_config(decoder=True).to_dict()
    lengthwise = sorted(set(_rotary_types(text)) - _ROTARY)
    both_ways = [name for name in ("prefix_lm", "use_bidirectional_attention") if text.get(name) in (True, "all")]
    both_ways += [name for name in ("causal", "is_causal") if text.get(name) is False]
    nested = dict(_settings(value for value in described.values() if isinstance(value, Mapping)))
    spatial = sorted({"mrope_section", "spatial_merge_size"} & nested.keys())
    reason = ""
    if lengthwise:
        reason = f"its rotary embedding is of type {lengthwise[0]!r}, whose frequencies depend on the whole prompt"
    elif both_ways or described["model_type"] == "paligemma":
        reason = f"its tokens see those after them ({', '.join(both_ways) or 'paligemma'})"
    elif spatial:
        reason = f"positions follow the shapes of images ({spatial[0]}), which the model itself keeps"
    if reason:
        raise UnsupportedError(
            f"prefixes of {described['model_type']!r} cannot be stored: {reason}, so equal tokens may have different "
            "keys and values; use FarpoolCache without prefixes"
        )


def _settings(found: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of all settings in mappings, at any depth."""
    for one in found:
        if isinstance(one, Mapping):
            yield from one.items()
            yield from _settings(iter(one.values()))


def _rotary_types(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types of all rotary embeddings in the settings.

    Layers may have different types, and older configurations use other names for the setting.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            if name.startswith("rope_") and "type" in value:
                yield value["type"]
            yield from _rotary_types(value)
        elif name == "rope_type":
            yield value
