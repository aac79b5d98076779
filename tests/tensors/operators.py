"""Writes the table of all registered operators: how each is run when an argument is paged.

``python -m tests.tensors.operators`` writes ``docs/operators.md`` (counts by library) and ``docs/operators.txt`` (every
operator). Both belong to one version of torch, and a test compares them with what is registered.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import farpool  # noqa: F401  registers the rules
from farpool.tensors.dispatch import rule_of
from farpool.tensors.schema import signature_of

DOCS = Path(__file__).parents[2] / "docs"
LISTING, SUMMARY = DOCS / "operators.txt", DOCS / "operators.md"
BUILD = f"{torch.__version__} on {platform.machine()}"
"""Other builds register other operators."""
CLASSES = {
    "rule": "a rule is written for it, in `src/farpool/tensors/rules/`",
    "view": "views its argument; no bytes are read",
    "geometry": "changes the geometry of its argument in place; no bytes are read",
    "decomposed": "made of other operators: these are dispatched in its place",
    "arena": "keeps nothing: runs on real tensors over the arena; results are plain, and checked for aliases",
    "copies": "may keep its operands (packed weights, quantized, sparse, nested, opaque tensors; whatever a library "
    "keeps that is not PyTorch's own): runs on private copies, which do not count against the budget",
    "refused": "hands memory to others, or takes tensors in nested containers: `UnsupportedError`",
    "no tensors": "takes none, so it is never given a paged one",
}


def overloads() -> list[Any]:
    """All overloads that the dispatcher knows, by name."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        found.append(getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default"))
    return found


def class_of(func: Any) -> str:
    """The class of an overload, a key of `CLASSES`."""
    if not any(_may_hold_tensors(argument.type) for argument in func._schema.arguments):
        return "no tensors"
    return "rule" if rule_of(func) is not None else str(signature_of(func).treatment)


def _may_hold_tensors(kind: Any) -> bool:
    return kind.kind() in ("TensorType", "AnyType") or any(map(_may_hold_tensors, kind.containedTypes()))


def listing(funcs: Iterable[Any]) -> str:
    """One line for each overload: its class and its name; for a rule, also the class of what it leaves alone."""
    lines = []
    for func in funcs:
        kind = class_of(func)
        otherwise = f", else {signature_of(func).treatment}" if kind == "rule" else ""
        lines.append(f"{kind + otherwise:<21} {func.name()}\n")
    return "".join(lines)


def summary(funcs: Iterable[Any]) -> str:
    """The page with the classes, and how many operators of each library fall into them."""
    counts = Counter((func.namespace, class_of(func)) for func in funcs)
    totals = Counter()
    for (_, kind), count in counts.items():
        totals[kind] += count
    lines = [
        "# Operators",
        "",
        "How each operator that PyTorch registers is run when an argument is paged. The class follows from its schema",
        "(`src/farpool/tensors/treatment.py`), so operators of libraries that are not listed have one, too: copies.",
        "",
        f"Written for torch {BUILD} by `python -m tests.tensors.operators`; each operator is in",
        "[operators.txt](operators.txt).",
        "",
        "| class | operators | how it is run |",
        "|---|---|---|",
        *(f"| {kind} | {totals[kind]} | {text} |" for kind, text in CLASSES.items()),
        "",
        "| library | " + " | ".join(CLASSES) + " |",
        "|---|" + "---|" * len(CLASSES),
    ]
    for namespace in sorted({namespace for namespace, _ in counts}):
        row = [str(counts[namespace, kind] or "") for kind in CLASSES]
        lines.append(f"| {namespace} | " + " | ".join(row) + " |")
    lines += [
        "",
        "On the CPU, operators of the class *arena* that torch marks as elementwise or as reductions, and a few more",
        "that only move or compare elements, take views that are scattered over more than the budget on plain copies",
        "(`src/farpool/tensors/rules/scattered.py`).",
        "",
        "Higher-order operators (`cond`, `flex_attention`, ...) have no schema: there PyTorch itself refuses paged",
        "tensors (`NotImplementedError`).",
        "",
        "[subclasses.md](subclasses.md) lists the operators that torch computes in another way for tensor subclasses.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    registered = overloads()
    (folder / LISTING.name).write_text(listing(registered))
    (folder / SUMMARY.name).write_text(summary(registered))
