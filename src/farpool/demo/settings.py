"""Settings of the demo. This module does not import torch, so that the command shows its help quickly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run of the demo.

    Attributes
    ----------
    budget, dram, nvme : str
        Sizes of the fast tier, the DRAM tier and the NVMe tier: bytes with a unit (``"20 MiB"``) or a percentage of the
        model's weights (``"25%"``).
    question : str
        Question for which the demo searches the texts.
    docs : Path or None
        Folder of the user's own ``.txt`` and ``.md`` files; None for the standard library's documentation.
    texts : int
        Maximum number of passages.
    timeline : Path or None
        File to draw the timeline into; None for no timeline.
    remote : bool
        True to use memory of two nodes, which the demo starts, instead of DRAM and NVMe. Then the demo has a second
        act, in which processes start with weights that another process has published, or with weights from a file.
    starts : int
        Number of processes in the second act that start with published weights; as many others start with a file.
    """

    budget: str = "25%"
    dram: str = "50%"
    nvme: str = "100%"
    question: str = "How can I run another program and read what it prints?"
    docs: Path | None = None
    texts: int = 512
    timeline: Path | None = None
    remote: bool = False
    starts: int = 3
