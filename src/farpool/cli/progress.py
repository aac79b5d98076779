"""Progress bars for long commands, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Told", "progress_bars"]

Told = Callable[[str, int, int], None]
"""Callable that receives the name of a step, the amount of it that is done, and its total amount."""


@contextmanager
def progress_bars() -> Iterator[Told]:
    """Show a progress bar for each step that the program reports to the yielded callable.

    If stderr is not a terminal, no bars are shown.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description:<30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as bars:

        def told(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step)
            bars.update(tasks[step], completed=done, total=total)

        yield told
