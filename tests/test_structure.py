"""Limits of the sources that keep them readable: rooms, lengths of functions, parameters."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES_MAX = 70
PARAMETERS_MAX = 10
ROOMS_MAX = 10
SETTINGS = {"src/farpool/cluster/node/node.py: Node.__init__"}
"""Functions whose parameters are the settings of a program. The commands of `farpool.cli` have such parameters, too."""

# Preprocessor lines, comments, and texts of one line or raw ones: in them a brace is no brace.
CPP_TEXT = re.compile(
    r'^[ \t]*#(?:\\\n|[^\n])*|R"(\w*)\(.*?\)\1"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-zA-Z])'(?:\\.|[^'\\\n])+'",
    re.DOTALL | re.MULTILINE,
)
CPP_SCOPE = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b[^()]*$")


@functools.cache
def python_functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Path and name of each function of the packages, its tree, and its lines.

    A line with only a comment does not count, or the limit would be a reason to leave a comment out.
    """
    sources = [
        source for base in ("src", "benchmarks/src", "plugins") for source in sorted((ROOT / base).rglob("*.py"))
    ]
    assert len(sources) > 300
    found = []
    for source in sources:
        text = source.read_text()
        tree, lines = ast.parse(text), text.splitlines()
        owners = {child: node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                owner = f"{owners[node]}." if node in owners else ""
                own = [line for line in lines[node.lineno - 1 : node.end_lineno] if not line.lstrip().startswith("#")]
                found.append((f"{source.relative_to(ROOT)}: {owner}{node.name}", node, len(own)))
    return found


def cpp_functions(source: Path) -> Iterator[tuple[str, int]]:
    """Text before the body of each function of a C++ file, and the number of lines of the body."""
    text = CPP_TEXT.sub(lambda found: "\n" * found[0].count("\n"), source.read_text())
    opened: list[tuple[str, int]] = []
    line = end = 0
    for mark in re.finditer("[{};]", text):
        head = " ".join(text[end : mark.start()].split())
        line += text.count("\n", end, mark.start())
        end = mark.end()
        if mark[0] == "{":
            opened.append((head, line))
        elif mark[0] == "}":
            before, first = opened.pop()
            if ")" in before and all(not outer or CPP_SCOPE.search(outer) for outer, _ in opened):
                yield before, line - first + 1
    assert not opened, f"{source}: a brace is not closed"


def test_no_python_function_is_long() -> None:
    found = {name: lines for name, _, lines in python_functions()}
    assert len(found) > 3000
    assert {name: lines for name, lines in found.items() if lines > LINES_MAX} == {}


def test_no_function_of_the_native_core_is_long_except_registrations_of_bindings() -> None:
    found = [
        (f"{source.relative_to(ROOT)}: {head}", lines)
        for source in sorted((ROOT / "native").rglob("*.?pp"))
        for head, lines in cpp_functions(source)
    ]
    assert len(found) > 1500
    long = [(name, lines) for name, lines in found if lines > LINES_MAX]
    registration = re.compile(r"native/bindings/\w+\.cpp: void bind_\w+\(nb::module_& m\)")
    registrations = [name for name, _ in long if registration.fullmatch(name)]
    assert len(registrations) > 3
    assert [(name, lines) for name, lines in long if name not in registrations] == []


def test_no_python_function_has_many_parameters_except_settings() -> None:
    wrong = []
    for name, node, _ in python_functions():
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        count = len([one for one in given if one is not None and one.arg not in ("self", "cls")])
        if count > PARAMETERS_MAX and not name.startswith("src/farpool/cli/") and name not in SETTINGS:
            wrong.append((name, count))
    assert wrong == []


def test_the_package_has_few_rooms_at_its_root() -> None:
    rooms = {path.parent.name for path in (ROOT / "src" / "farpool").glob("*/__init__.py")}
    assert "abc" in rooms
    assert len(rooms) <= ROOMS_MAX, sorted(rooms)
