"""Which folder of the native core may include which, and where it may know Python and the farpool modules above it."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

# Folder, and the folders that it may include besides itself. Each stands below the folders that it includes.
MAY_INCLUDE = {
    "core": set(),
    "policy": {"core"},
    "pager": {"core"},
    "device": {"core"},
    "region": {"core", "policy", "pager"},
    "wire": {"core"},
    "node": {"core", "policy", "wire"},
    "bindings": {"core", "policy", "pager", "device", "region", "wire", "node"},
    "tests": {"core", "policy", "pager", "device", "region", "wire", "node"},
    "fuzz": {"core", "wire", "node"},
}


def sources() -> list[Path]:
    found = sorted(NATIVE.rglob("*.?pp"))
    assert len(found) > 150
    return found


def included(source: Path) -> list[str]:
    """Files of the project that a source includes, as it spells them."""
    return [name for mark, name in INCLUDE.findall(source.read_text()) if mark == '"']


def test_only_the_bindings_include_headers_of_python_nanobind_and_torch() -> None:
    knowing = {
        source.relative_to(NATIVE).parts[0]
        for source in sources()
        for _, header in INCLUDE.findall(source.read_text())
        if re.match(r"Python\.h$|(nanobind|torch|ATen|c10|bindings)/", header)
    }
    assert knowing == {"bindings"}


def test_each_include_of_the_project_is_quoted_and_names_the_path_from_native() -> None:
    wrong = [
        f"{source.relative_to(NATIVE)}: {mark}{name}"
        for source in sources()
        for mark, name in INCLUDE.findall(source.read_text())
        if (mark == '"') != (NATIVE / name).is_file() or ".." in Path(name).parts
    ]
    assert not wrong, 'write #include "folder/file.hpp" for a file of the project and #include <...> for any other'


def test_folders_include_only_folders_below_them() -> None:
    folders = list(MAY_INCLUDE)
    for place, folder in enumerate(folders):
        assert MAY_INCLUDE[folder] <= set(folders[:place]), f"{folder} stands above a folder that it may include"
    assert {source.relative_to(NATIVE).parts[0] for source in sources()} == set(folders)
    wrong = [
        f"{source.relative_to(NATIVE)} includes {name}"
        for source in sources()
        for folder in [source.relative_to(NATIVE).parts[0]]
        for name in included(source)
        if name.split("/")[0] not in MAY_INCLUDE[folder] | {folder}
    ]
    assert not wrong, "move the file down, or pass in the thing that it needs"


def test_a_node_s_catalogue_knows_no_connection_and_no_session() -> None:
    catalogue = sorted((NATIVE / "node" / "catalogue").glob("*.?pp"))
    assert len(catalogue) > 20
    below = {"node/budget.hpp", "node/files.hpp"}
    wrong = [
        f"{source.relative_to(NATIVE)} includes {name}"
        for source in catalogue
        for name in included(source)
        if name.startswith("node/") and not name.startswith("node/catalogue/") and name not in below
    ]
    assert not wrong, "pass in the thing that the catalogue needs"


def test_no_medium_is_known_to_the_catalogue_except_ram() -> None:
    # A new kind of memory is one file: only the server chooses it.
    knowing = {str(source.relative_to(NATIVE)) for source in sources() if "node/catalogue/nvme.hpp" in included(source)}
    assert {name for name in knowing if name.startswith("node/")} == {"node/catalogue/nvme.cpp", "node/server.cpp"}


def test_no_file_includes_itself_directly_or_through_others() -> None:
    graph = {str(source.relative_to(NATIVE)): included(source) for source in sources()}
    assert sum(map(len, graph.values())) > 400
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these files include each other: {' <- '.join(error.args[1])}") from None


def test_the_stub_of_the_native_core_imports_no_module_of_farpool() -> None:
    # The import checker reads no stubs, and each module of farpool that the stub named would import the native core.
    tree = ast.parse((ROOT / "src" / "farpool" / "_native.pyi").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert "typing" in imported
    assert not [module for module in imported if module.split(".")[0] == "farpool"]
