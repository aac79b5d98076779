"""Calls of `farpool.kv.PrefixCache` under their names of earlier releases, which the next release no longer has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from farpool.kv.plan import Prompt

__all__ = ["OldCalls"]


class _Old:
    """A call under its old name; it warns, and makes the new call.

    Parameters
    ----------
    new : str
        The new call, for the warning.
    call : str or callable
        Name of the new method; or a function that takes the cache and the old arguments, and makes the new call.
    **fixed
        Keyword arguments of the new call that the old name implies.
    """

    def __init__(self, new: str, call: str | Callable[..., Any], **fixed: Any) -> None:
        self._new, self._call, self._fixed = new, call, fixed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, cache: Any, owner: type | None = None) -> Callable[..., Any]:
        def old_call(*given: Any, **named: Any) -> Any:
            warnings.warn(
                f"PrefixCache.{self._name} is not in the next release; call {self._new} instead",
                DeprecationWarning,
                stacklevel=2,
            )
            call = getattr(cache, self._call) if isinstance(self._call, str) else partial(self._call, cache)
            return call(*given, **self._fixed, **named)

        return old_call


def _prompts(
    tokens: Sequence[Sequence[int]],
    salts: Sequence[bytes | str] = (),
    requests: Sequence[str] = (),
    starts: Sequence[int] = (),
) -> list[Prompt]:
    """Return prompts from their fields, of which all but the tokens may be left out."""
    count = len(tokens)
    each = zip(tokens, salts or [b""] * count, requests or [""] * count, starts or [0] * count, strict=True)
    return [Prompt(*fields) for fields in each]


def _lookup_many(cache: Any, prompts: Any, *, salts: Any = (), requests: Any = (), **options: Any) -> Any:
    try:
        asked = _prompts(prompts, salts, requests)
    except BaseException:
        cache._peers.abandon(cache._peers.begin())  # the other ranks wait for this one
        raise
    return cache.lookup(asked, **options) if asked else []


def _save_many(
    cache: Any, sequences: Any, memories: Any, *, starts: Any = (), salts: Any = (), requests: Any = (), **options: Any
) -> Any:
    return cache.save(_prompts(sequences, salts, requests, starts), memories, **options) if len(sequences) else []


def _load_many(cache: Any, matches: Any, memories: Any, **options: Any) -> Any:
    return cache.load(matches, memories, **options)


def _save_layers(cache: Any, tokens: Any, memory: Any, layers: Any, **options: Any) -> Any:
    return cache.save(tokens, memory, layers=layers, wait=False, **options)


class OldCalls:
    """Old names of a `PrefixCache`."""

    lookup_many = _Old("lookup([Prompt(tokens, salt, request), ...])", _lookup_many)
    lookup_async = _Old("lookup(tokens, wait=False)", "lookup", wait=False)
    load_many = _Old("load([match, ...], [memory, ...])", _load_many)
    load_async = _Old("load(match, memory, wait=False)", "load", wait=False)
    load_layers = _Old("load_parts(match, memory)", "load_parts")
    save_many = _Old("save([Prompt(tokens, salt, request, start), ...], [memory, ...])", _save_many)
    save_async = _Old("save(tokens, memory, wait=False)", "save", wait=False)
    save_layers = _Old("save(tokens, memory, layers=layers, wait=False)", _save_layers)
