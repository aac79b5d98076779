"""The figures in the README are those of the committed result files."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def figures() -> list[str]:
    """The rows of the README's table, from the result of ``farpool demo --json``."""
    result = json.loads((ROOT / "bench/results/demo.json").read_text())["result"]
    seconds = result["paged"]["first_seconds"] + result["paged"]["rest_seconds"]
    stalled = result["first"]["stall_seconds"] + result["rest"]["stall_seconds"]
    megabyte = 1e6
    return [
        f"| embeddings equal to the all-resident run, bit for bit | {'all' if result['equal'] else 'NOT'} "
        f"{result['passages']} |",
        f"| peak of the fast tier, of its budget | {result['peak_bytes'] / megabyte:.1f} of "
        f"{result['budget_bytes'] / megabyte:.1f} MB |",
        f"| throughput against all-resident, median over the batches | {result['relative_throughput']:.2f} |",
        f"| prefetched blocks that were used | {result['rest']['prefetch_accuracy']:.1%} |",
        f"| waited for bytes, of the paged run's time | {stalled / seconds:.1%} |",
    ]


def test_the_readme_quotes_its_result_file() -> None:
    readme = (ROOT / "README.md").read_text()
    for row in figures():
        assert row in readme, row


def test_result_files_say_where_they_come_from() -> None:
    for path in (ROOT / "bench/results").glob("*.json"):
        provenance = json.loads(path.read_text())["provenance"]
        assert provenance["command"].startswith("farpool ")
        assert provenance["date"]
        assert provenance["versions"]["farpool"]
        assert "/tmp/" not in provenance["command"]
