"""``farpool bench``: the benchmarks of the separate package farpool-bench, found by its entry point."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from farpool.errors import ConfigError

__all__ = ["app"]

_GROUP = "farpool.commands"
"""Entry-point group in which packages offer commands."""


class _Benchmarks(TyperGroup):
    """The commands of the package farpool-bench. They are imported at first use, so that other commands start fast."""

    def list_commands(self, ctx: Any) -> list[str]:
        return self._loaded().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._loaded().get_command(ctx, cmd_name)

    def _loaded(self) -> TyperGroup:
        for entry in entry_points(group=_GROUP, name="bench"):
            return get_group(entry.load())
        raise ConfigError(
            "the benchmarks are in the package farpool-bench, which is not installed; in a clone of farpool: "
            "pip install ./benchmarks"
        )


app = typer.Typer(
    cls=_Benchmarks,
    help="Measure farpool, the machine's limit, and other tools for the same task.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
