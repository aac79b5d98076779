"""Attacks that the code withstands, and the record of what each did before it was made to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.attacks.program import MODULES, load_all, run
from tests.attacks.record import Recording

ATTACKS = load_all()
BEFORE = Path(__file__).parent / "before"

# Attacks that come to nothing now. A name goes in when its cure does, and never out again; what is not here is not run.
CURED = frozenset(
    {
        "access.guess_offline",
        "access.hang_up_signal",
        "access.leave_memory_behind",
        "access.without_keys",
        "deadlines.endless_source",
        "deadlines.overlapping_faults",
        "dram_bound.tenants_in_turn",
        "dram_bound.told_by_a_metric",
        "eavesdrop.read_the_wire",
        "foreign_keys.search_another_index",
        "foreign_keys.time_what_another_has",
        "foreign_session.by_another_key_of_the_tenant",
        "foreign_session.by_another_tenant",
        "foreign_session.undo_pins_and_preparations",
        "hot_copies.churn",
        "idle_clients.keep_others_out",
        "idle_sockets.at_the_metrics",
        "idle_sockets.before_the_handshake",
        "kill_with_nvme.kill_at_random",
        "lease_files.cut_off",
        "lease_files.forge_the_capacity",
        "lease_files.forge_the_owner",
        "lease_files.keep_what_was_given_back",
        "lease_files.make_longer",
        "lease_files.take_memory_behind_the_end",
        "many_lists.beside_another_list",
        "many_lists.beside_other_calls",
        "many_sessions.lease_everything",
        "many_sessions.pin_everything",
        "many_sessions.prepare_everything",
        "one_failure.one_holder_killed",
        "one_host.open_other_tenants_files",
        "one_host.reopen_for_writing",
        "overwritten.get_with_defaults",
        "preparing.evict_by_preparing",
        "quotas.evict_by_announcing",
        "quotas.evict_by_leasing",
        "quotas.fill_everything",
        "quotas.lease_single_bytes",
        "quotas.list_what_nobody_has",
        "quotas.pin_everything",
        "replacement.with_a_sweep",
        "replacement.with_reads",
        "starving.with_lookups",
        "starving.with_puts",
        "tickets.forge",
        "tickets.kill_before_use",
        "tickets.replay",
        "tickets.write_across_an_order",
        "two_copies.order_of_bytes",
        "two_copies.python_calls",
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CURED))
def test_a_cured_attack_is_held(name: str) -> None:
    result = run(ATTACKS[name])
    if result.outcome.held is None:
        pytest.skip(result.outcome.verdict)
    assert result.control.held, result.control.verdict
    assert result.outcome.held, result.outcome.verdict


def test_what_is_cured_is_an_attack() -> None:
    assert not CURED - ATTACKS.keys()


@pytest.mark.parametrize("module", MODULES)
def test_what_each_attack_did_before_is_recorded(module: str) -> None:
    recording = msgspec.json.decode((BEFORE / f"{module}.json").read_bytes(), type=Recording)
    assert recording.text() == (BEFORE / f"{module}.txt").read_text()
    assert [result.name for result in recording.results] == [name for name in ATTACKS if name.startswith(f"{module}.")]
    for result in recording.results:
        assert result.outcome.word in ("held", "broken")
        assert result.control.word == "held", "the attack's figures may be those of something else"
    assert recording.commit
    assert recording.cpu
    assert recording.command.endswith(module) or f"{module} " in recording.command
