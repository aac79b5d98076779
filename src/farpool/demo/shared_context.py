"""``farpool demo --kv``: two processes answer questions over one long context.

The first process computes the context's KV and saves it on a node. The second process answers with this KV and without
it. The model is a small Llama with random weights from a fixed seed, so its answers make no sense. The demo compares
the tokens of both processes, and the time to the first token with and without loaded KV.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from rich.console import Group, RenderableType
from rich.panel import Panel

from farpool.decoding import prepared
from farpool.demo.corpus import library_passages, pick
from farpool.demo.nodes import lending
from farpool.errors import FarpoolError
from farpool.observe.tables import Table

__all__ = ["BLOCK_TOKENS", "Answer", "ContextOutcome", "ContextReply", "ContextRequest", "report", "run"]

BLOCK_TOKENS = 16
"""Number of tokens whose KV is saved and loaded together."""
_PROCESS_TIMEOUT_S = 600.0
_NODE_BYTES = 1 << 30
_QUESTIONS = (
    "How can I run another program and read what it prints?",
    "Which function sorts a list in place?",
    "How do I parse a date from text?",
)


class ContextRequest(msgspec.Struct, frozen=True):
    """Request to a process: the context and the questions as token ids, and a flag to save KV or to load it.

    Attributes
    ----------
    node : str
        Address of the node that keeps KV.
    context : list of int
        Tokens of the context, which comes before each question.
    questions : list of list of int
        Tokens of each question.
    new_tokens : int
        Length of each answer in tokens.
    saves : bool
        True: compute the context, save its KV, and answer each question once. False: answer each question twice, once
        without and once with KV from the node.
    """

    node: str
    context: list[int]
    questions: list[list[int]]
    new_tokens: int
    saves: bool


class Answer(msgspec.Struct, frozen=True):
    """Answer to one question.

    Attributes
    ----------
    tokens : list of int
        Generated tokens.
    first_seconds : float
        Time from the question to the first token.
    loaded_tokens : int
        Number of tokens of the context whose KV was loaded.
    loading_seconds : float
        Time of lookup and load, which is part of `first_seconds`.
    missed : str
        Reason why some whole blocks were not loaded, as in ``farpool why``. Empty if all whole blocks were loaded, or
        if no load was requested.
    """

    tokens: list[int]
    first_seconds: float
    loaded_tokens: int
    loading_seconds: float
    missed: str = ""


class ContextReply(msgspec.Struct, frozen=True):
    """Reply of a process: its answers with loaded KV and with computed KV, and the bytes of KV that it has saved."""

    loaded: list[Answer]
    computed: list[Answer]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ContextOutcome:
    """Outcome of the demo.

    Attributes
    ----------
    equal : bool
        True if both processes gave the same tokens, also with loaded KV in place of computed KV.
    context_tokens : int
        Length of the context.
    whole_tokens : int
        Number of tokens in the whole blocks of the context. Only whole blocks can be loaded.
    loaded_tokens : int
        Minimum, over the questions, of the number of tokens whose KV the second process loaded.
    missed : str
        Reason why the second process did not load all `whole_tokens`; empty if it loaded all of them.
    nbytes : int
        Bytes of the context's KV.
    questions : list of str
        The questions as text.
    computed : list of float
        For each question, the seconds to the first token when the second process computes all KV.
    loaded : list of float
        For each question, the seconds to the first token when the second process loads the context's KV.
    loading : list of float
        For each question, the seconds of lookup and load.
    speedup : float
        Median over the questions of `computed` divided by `loaded`.
    """

    equal: bool
    context_tokens: int
    whole_tokens: int
    loaded_tokens: int
    missed: str
    nbytes: int
    questions: list[str]
    computed: list[float]
    loaded: list[float]
    loading: list[float]
    speedup: float

    @property
    def passed(self) -> bool:
        """True if the tokens are equal and the second process has loaded all whole blocks of the context."""
        return self.equal and self.loaded_tokens >= self.whole_tokens


def run(context_tokens: int, new_tokens: int, progress: Callable[[str, int, int], None]) -> ContextOutcome:
    """Start a node, and run both processes one after the other.

    Parameters
    ----------
    context_tokens : int
        Length of the shared context; a token is a byte of text.
    new_tokens : int
        Length of each answer in tokens.
    progress : callable
        Receives the name of a step, how much of the step is done, and the total.

    Raises
    ------
    FarpoolError
        A process or the node fails.
    """
    text = "\n\n".join(passage.text for passage in pick(library_passages(), max(1, context_tokens // 64)))
    context = list(text.encode())[:context_tokens]
    questions = [list(question.encode()) for question in _QUESTIONS]
    with lending(1, _NODE_BYTES) as (node,):
        replies: list[ContextReply] = []
        for number, step in enumerate(("compute and save", "load and answer")):
            progress("processes", number, 2)
            replies.append(_ask(ContextRequest(node, context, questions, new_tokens, saves=number == 0), step))
        progress("processes", 2, 2)
    first, second = replies
    expected = [answer.tokens for answer in first.computed]
    fewest = min(second.loaded, key=lambda answer: answer.loaded_tokens)
    whole_tokens = len(context) // BLOCK_TOKENS * BLOCK_TOKENS
    computed, loaded = ([one.first_seconds for one in answers] for answers in (second.computed, second.loaded))
    return ContextOutcome(
        equal=all([one.tokens for one in answers] == expected for answers in (second.computed, second.loaded)),
        context_tokens=len(context),
        whole_tokens=whole_tokens,
        loaded_tokens=fewest.loaded_tokens,
        missed=fewest.missed if fewest.loaded_tokens < whole_tokens else "",
        nbytes=first.nbytes,
        questions=list(_QUESTIONS),
        computed=computed,
        loaded=loaded,
        loading=[answer.loading_seconds for answer in second.loaded],
        speedup=statistics.median(slow / fast for slow, fast in zip(computed, loaded, strict=True)),
    )


def _ask(request: ContextRequest, step: str) -> ContextReply:
    """Start a new process with a request, and return the process's reply. `step` names the request in errors."""
    done = subprocess.run(
        [sys.executable, "-m", "farpool.demo.context_worker"],
        input=msgspec.json.encode(request),
        capture_output=True,
        timeout=_PROCESS_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise FarpoolError(f"the process to {step} ended with code {done.returncode}: {done.stderr.decode().strip()}")
    return msgspec.json.decode(done.stdout, type=prepared(ContextReply))


def report(outcome: ContextOutcome) -> RenderableType:
    """Build the report. It says if both processes gave the same answers, and gives the times to the first tokens."""
    table = Table("Time to the first token, in the second process", expand=True)
    table.add_texts("question")
    table.add_figures("computed", "loaded", "of that lookup and load", "times faster")
    for question, computed, loaded, loading in zip(
        outcome.questions, outcome.computed, outcome.loaded, outcome.loading, strict=True
    ):
        table.add_row(
            question, f"{computed:.2f} s", f"{loaded:.3f} s", f"{loading * 1e3:.1f} ms", f"{computed / loaded:.1f}"
        )
    verdict = (
        "[bold green]equal[/]  both processes give the same tokens, with KV computed and with KV loaded"
        if outcome.equal
        else "[bold red]NOT EQUAL[/]  the answers differ"
    )
    reused = (
        f"[bold]reused[/]  {outcome.loaded_tokens} of {outcome.context_tokens} tokens of context, "
        f"{outcome.nbytes / 1e6:.1f} MB of KV that the first process has saved on a node"
        if outcome.loaded_tokens >= outcome.whole_tokens
        else f"[bold red]NOT REUSED[/]  {outcome.loaded_tokens} of {outcome.context_tokens} tokens of context were "
        f"loaded, expected {outcome.whole_tokens}; the others were computed: {outcome.missed}"
    )
    return Group(Panel(f"{verdict}\n{reused}", expand=True), table)
