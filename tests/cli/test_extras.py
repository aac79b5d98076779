"""Packages of extras: without one, a command that needs it fails before it opens or makes anything."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.certificates import Certificates

_PACKAGES = ("cryptography", "prometheus_client")
_BLOCK = """\
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name in {}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, NotInstalled())
"""


def without(packages: tuple[str, ...], program: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process, where each import of the packages fails as if they were not installed."""
    command = [sys.executable, "-c", _BLOCK.format(packages) + program, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def command_without(packages: tuple[str, ...], *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return without(packages, "from farpool.cli.main import main\nmain()", *words, cwd=cwd)


@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        ("cryptography", "tls", "certs init"),
        pytest.param("cryptography", "tls", "certs issue trainer --role client", marks=pytest.mark.slow),
        pytest.param("cryptography", "tls", "certs rotate trainer", marks=pytest.mark.slow),
        ("cryptography", "bench", "bench remote --quick"),
        pytest.param("numpy", "bench", "bench --help", marks=pytest.mark.slow),
        ("fastapi", "manager", "manager --listen 127.0.0.1:0 --registry here"),
        pytest.param("uvicorn", "manager", "up --registry here", marks=pytest.mark.slow),
        pytest.param("uvicorn", "manager", "demo --pool", marks=pytest.mark.slow),
        ("prometheus_client", "metrics", "node --listen 127.0.0.1:0 --dram 1MiB --folder here --metrics 127.0.0.1:0"),
        # Nothing listens on port 1: a command that connected first would report that.
        pytest.param(
            "prometheus_client",
            "metrics",
            "store repair --node tcp://127.0.0.1:1 --metrics here.prom",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_command_without_its_extra_says_how_to_install_it(
    package: str, extra: str, words: str, tmp_path: Path
) -> None:
    done = command_without((package,), *words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"needs the package '{package}'; pip install 'farpool[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_benchmark_needs_only_the_packages_that_it_uses(tmp_path: Path) -> None:
    done = command_without(("cryptography", "numpy"), "bench", "growth", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Blocks of the largest pool" in done.stdout


@pytest.mark.slow
def test_metrics_of_a_node_with_tls_need_both_extras(tmp_path: Path) -> None:
    certificate = Certificates(tmp_path).node()
    words = f"node --listen 127.0.0.1:0 --dram 1MiB --folder here --metrics 127.0.0.1:0 --tls {certificate}".split()
    done = command_without(("cryptography",), *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "--metrics with --tls needs the package 'cryptography'; pip install 'farpool[tls]'" in done.stderr
    assert not (tmp_path / "here").exists()


def test_each_extra_brings_its_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {
        name: [one.partition(">=")[0] for one in given] for name, given in project["optional-dependencies"].items()
    }
    assert (extras["tls"], extras["metrics"]) == (["cryptography"], ["prometheus-client"])
    assert extras["manager"] == ["farpool[metrics,tls]", "fastapi", "uvicorn"]
    assert not {"cryptography", "prometheus-client"} & {one.partition(">=")[0] for one in project["dependencies"]}


@pytest.mark.slow
def test_help_needs_no_extra(tmp_path: Path) -> None:
    for words in ("certs --help", "certs init --help", "node --help"):
        done = command_without(_PACKAGES, *words.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_node_with_tls_and_a_store_need_no_extra(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    program = f"""
import os
os.environ["FARPOOL_TLS"] = {str(certificates.client("trainer"))!r}
from farpool.cluster.node import Node
from farpool.cluster.store import Store
from farpool.cluster.wire.access import load_keys
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.certificate import CertificateFolder
from pathlib import Path

keys = Path("keys.toml")
keys.touch(mode=0o600)
keys.write_text('[keys.trainer]\\nrights = ["read", "publish"]\\n')
listen = parse_address("127.0.0.1:0", "listen", any_port=True)
tls = CertificateFolder({str(certificates.node())!r}, "tls")
with Node(listen, 1 << 20, folder="here", ephemeral=True, keys=load_keys(keys), tls=tls) as node:
    with Store(str(node.address), transport="tcp") as store:
        store.put("greeting", b"hello")
        print(store.get("greeting").decode())
"""
    done = without(_PACKAGES, program, cwd=tmp_path)
    assert done.stdout == "hello\n", done.stderr


def test_counters_of_a_cache_say_how_to_install_their_extra(tmp_path: Path) -> None:
    done = without(_PACKAGES, "import farpool.kv\nfarpool.kv.KVCollector", cwd=tmp_path)
    assert "farpool.kv.KVCollector needs the package 'prometheus_client'; pip install 'farpool[metrics]'" in done.stderr
