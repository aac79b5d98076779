"""Reports that a rule of the pool was broken."""

from __future__ import annotations

__all__ = ["Violation", "require"]


class Violation(Exception):  # noqa: N818 - a finding of the simulation, not an error of its user
    """A rule of the pool was broken.

    Attributes
    ----------
    rule : str
        Name of the rule. A shorter schedule is a reduction of a failing one if it breaks the same rule.
    text : str
        Details, for people.
    """

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule, self.text = rule, text


def require(holds: bool, rule: str, text: str) -> None:
    """Raise `Violation` unless a condition holds."""
    if not holds:
        raise Violation(rule, text)
