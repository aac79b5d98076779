"""How agents open: with a stand-in for NIXL that fails when it is told to, and with NIXL in a network of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from farpool.errors import ConfigError
from farpool_nixl import agent
from farpool_nixl.agent import Agent
from tests.machines import PATIENCE, isolated, why_not


class _BackendError(Exception):
    pass


class _OtherError(Exception):
    pass


class _Native:
    """NIXL's module, as far as it is used to open agents: UCX fails with each of `failures`, one after the other.

    Attributes
    ----------
    names : list of str
        What the agents were called that were made.
    """

    nixlBackendError = _BackendError  # noqa: N815 (NIXL's name)
    nixlAgentConfig = SimpleNamespace  # noqa: N815 (NIXL's name)
    NIXL_THREAD_SYNC_STRICT = object()

    def __init__(self, failures: list[Exception]) -> None:
        self._failures = failures
        self.names: list[str] = []

    def nixlAgent(self, name: str, _: Any) -> Any:  # noqa: N802 (NIXL's name)
        self.names.append(name)
        return SimpleNamespace(createBackend=self._create, getLocalMD=name.encode)

    def _create(self, kind: str, _: dict[str, str]) -> None:
        assert kind == "UCX"
        if self._failures:
            raise self._failures.pop(0)


def use(monkeypatch: pytest.MonkeyPatch, failures: list[Exception]) -> _Native:
    native = _Native(failures)
    monkeypatch.setattr(agent, "bindings", lambda: native)
    return native


@pytest.mark.parametrize("failures", [0, 1, 4])
def test_an_agent_opens_though_ucx_failed_before(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    native = use(monkeypatch, [_BackendError("NIXL_ERR_BACKEND") for _ in range(failures)])
    opened = Agent(serves=False)
    assert len(set(native.names)) == failures + 1
    assert opened.metadata().decode() == native.names[-1]


def test_a_failure_that_stays_is_an_error_that_says_how_to_learn_more(monkeypatch: pytest.MonkeyPatch) -> None:
    native = use(monkeypatch, [_BackendError("NIXL_ERR_BACKEND") for _ in range(99)])
    with pytest.raises(ConfigError, match=r"NIXL cannot be used here: NIXL_ERR_BACKEND; .*UCX_LOG_LEVEL") as caught:
        Agent(serves=True)
    assert len(native.names) == 5
    assert caught.value.setting == "transport"


def test_a_failure_that_no_interface_causes_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    native = use(monkeypatch, [_OtherError("NIXL_ERR_NOT_FOUND")])
    with pytest.raises(ConfigError, match="NIXL_ERR_NOT_FOUND"):
        Agent(serves=True)
    assert len(native.names) == 1


# The system has forgotten that the address of the interface "gone" is its own: to UCX that is an interface with an
# address, until it tries to use it.
_NETWORK = """
mount -t sysfs sysfs /sys || exit 77
ip link set lo up
ip link add gone type veth peer name other
ip address add 198.18.0.1/30 dev gone
ip link set other up
ip link set gone up
ip route delete local 198.18.0.1 dev gone table local
"""
_VANISHES = """
import subprocess
from farpool_nixl.agent import Agent, bindings

native = bindings()
make, made = native.nixlAgent, []

def counted(*words):
    made.append(words)
    if len(made) == 2:
        subprocess.run(["ip", "link", "delete", "gone"], check=True)
    return make(*words)

native.nixlAgent = counted
assert Agent(serves=False).metadata()
print(len(made))
"""
_STAYS = """
import os
from farpool.errors import NodeError
from farpool_nixl.exposure import NixlExposure

file = os.memfd_create("segment")
os.truncate(file, 1 << 20)
try:
    NixlExposure(file, loopback=False)
except NodeError as error:
    print(error)
"""


def run_beside_a_dead_interface(code: str) -> str:
    script = f'set -e\n{_NETWORK}exec "$0" -c "$1"'
    done = subprocess.run(
        isolated(["sh", "-c", script, sys.executable, code]), timeout=PATIENCE, capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip(f"a network's interfaces cannot be shown in /sys: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed (farpool[nixl])"
)
needs_machines = pytest.mark.skipif(bool(reason := why_not()), reason=reason)


@pytest.mark.slow
@needs_nixl
@needs_machines
def test_an_agent_opens_though_an_interface_goes_away_meanwhile() -> None:
    assert run_beside_a_dead_interface(_VANISHES) == "2"


@pytest.mark.slow
@needs_nixl
@needs_machines
def test_a_node_says_that_nixl_fails_and_not_what_ucx_logs() -> None:
    said = run_beside_a_dead_interface(_STAYS)
    assert said.startswith("memory cannot be exposed for one-sided transfers: NIXL cannot be used here: NIXL_ERR_")
