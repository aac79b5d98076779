"""Methods of `farpool.kv.PrefixCache` under their old names. The next release will remove these names."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from farpool.kv.plan import Prompt

__all__ = ["OldCalls"]


class OldCalls:
    """Methods of `PrefixCache` under their old names. Each of them warns and calls the method of the new name."""

    def lookup_many(self: Any, prompts: Any, *, salts: Any = (), requests: Any = (), **options: Any) -> Any:
        _warn("lookup_many", "lookup([Prompt(tokens, salt, request), ...])")
        try:
            asked = _prompts(prompts, salts, requests)
        except BaseException:
            self._peers.abandon(self._peers.begin())  # the other ranks wait for this one
            raise
        return self.lookup(asked, **options) if asked else []

    def lookup_async(self: Any, *given: Any, **named: Any) -> Any:
        _warn("lookup_async", "lookup(tokens, wait=False)")
        return self.lookup(*given, wait=False, **named)

    def load_many(self: Any, matches: Any, memories: Any, **options: Any) -> Any:
        _warn("load_many", "load([match, ...], [memory, ...])")
        return self.load(matches, memories, **options)

    def load_async(self: Any, *given: Any, **named: Any) -> Any:
        _warn("load_async", "load(match, memory, wait=False)")
        return self.load(*given, wait=False, **named)

    def load_layers(self: Any, *given: Any, **named: Any) -> Any:
        _warn("load_layers", "load_parts(match, memory)")
        return self.load_parts(*given, **named)

    def save_many(
        self: Any,
        sequences: Any,
        memories: Any,
        *,
        starts: Any = (),
        salts: Any = (),
        requests: Any = (),
        **options: Any,
    ) -> Any:
        _warn("save_many", "save([Prompt(tokens, salt, request, start), ...], [memory, ...])")
        return self.save(_prompts(sequences, salts, requests, starts), memories, **options) if len(sequences) else []

    def save_async(self: Any, *given: Any, **named: Any) -> Any:
        _warn("save_async", "save(tokens, memory, wait=False)")
        return self.save(*given, wait=False, **named)

    def save_layers(self: Any, tokens: Any, memory: Any, layers: Any, *, salt: Any = b"", **options: Any) -> Any:
        _warn("save_layers", "save(tokens, memory, layers=layers, wait=False)")
        return self.save(tokens, memory, layers=layers, salt=salt, wait=False, **options)


def _warn(old: str, new: str) -> None:
    """Warn the caller that it uses an old name."""
    message = f"PrefixCache.{old} is not in the next release; call {new} instead"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def _prompts(
    tokens: Sequence[Sequence[int]],
    salts: Sequence[bytes | str] = (),
    requests: Sequence[str] = (),
    starts: Sequence[int] = (),
) -> list[Prompt]:
    """Make prompts from lists of their fields. Only the list of tokens is required."""
    count = len(tokens)
    each = zip(tokens, salts or [b""] * count, requests or [""] * count, starts or [0] * count, strict=True)
    return [Prompt(*fields) for fields in each]
