"""``farpool sim``: a whole pool in one process, under virtual time, with faults that follow from a seed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from farpool.checks import require_package
from farpool.errors import ConfigError

if TYPE_CHECKING:
    from farpool.sim.simulation import Outcome

__all__ = ["sim"]

_STEPS_DEFAULT = 80
_PROGRESS_INTERVAL = 50


def sim(
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Run the schedule of this seed and print its log.", show_default=False),
    ] = None,
    seeds: Annotated[
        str, typer.Option(metavar="A:B", help="Run the seeds from A to B - 1, up to the first one that fails.")
    ] = "",
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of the programs in each run.", min=1)] = _STEPS_DEFAULT,
    shrink: Annotated[bool, typer.Option(help="Reduce the schedule of a run that fails.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a pool with faults in one process, and check its rules at every step.

    The pool runs farpool's own code under virtual time. Messages are delayed, lost and duplicated, and processes crash,
    as the seed decides. The same seed gives the same log. The exit code is 1 if a rule was broken.
    """
    require_package("cryptography", "tls", "the simulation of a pool")
    from farpool.sim.plan import make_plan
    from farpool.sim.shrink import shrink as reduced
    from farpool.sim.simulation import run_plan

    first, end = _range(seed, seeds)
    totals: dict[str, int] = {}
    for number in range(first, end):
        outcome = run_plan(make_plan(number, steps))
        totals = {name: totals.get(name, 0) + count for name, count in outcome.counts.items()}
        if outcome.violation is not None:
            _report(reduced(outcome) if shrink else outcome, json=json)
            raise typer.Exit(1)
        if seed is not None:
            _report(outcome, json=json)
            return
        if not json and (number + 1 - first) % _PROGRESS_INTERVAL == 0:
            typer.echo(f"{number + 1 - first} of {end - first} runs", err=True)
    if json:
        typer.echo(msgspec.json.encode({"seeds": [first, end], "runs": end - first, "counts": totals}).decode())
    else:
        typer.echo(f"{end - first} runs kept all rules: {_counted(totals)}")


def _range(seed: int | None, seeds: str) -> tuple[int, int]:
    """Return the first seed, and the one after the last."""
    if (seed is None) == (not seeds):
        raise ConfigError("expected either --seed N or --seeds A:B", setting="seeds")
    if seed is not None:
        return seed, seed + 1
    found = re.fullmatch(r"(\d+):(\d+)", seeds)
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError(f"--seeds is {seeds!r}, expected A:B with A below B, such as 0:500", setting="seeds")
    return int(found[1]), int(found[2])


def _report(outcome: Outcome, *, json: bool) -> None:
    plan, violation = outcome.plan, outcome.violation
    if json:
        found: dict[str, Any] = {
            "seed": plan.seed,
            "violation": None if violation is None else {"rule": violation.rule, "text": violation.text},
            "faults": [str(fault) for fault in plan.faults],
            "steps": [str(step) for step in plan.steps],
            "counts": outcome.counts,
            "log": outcome.log,
        }
        typer.echo(msgspec.json.encode(found).decode())
        return
    for line in outcome.log:
        typer.echo(line)
    typer.echo(f"seed {plan.seed}: {_counted(outcome.counts)}")
    if violation is not None:
        typer.echo(f"{len(plan.faults)} faults and {len(plan.steps)} steps break a rule: {violation}")


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
