"""Where the native core may know Python."""

from __future__ import annotations

import re
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "native"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def test_only_the_bindings_include_headers_of_python_nanobind_and_torch() -> None:
    knowing = {
        source.relative_to(NATIVE).parts[0]
        for source in NATIVE.rglob("*.?pp")
        for header in INCLUDE.findall(source.read_text())
        if re.match(r"Python\.h$|(nanobind|torch|ATen|c10|bindings)/", header)
    }
    assert knowing == {"bindings"}
