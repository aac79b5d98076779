"""``farpool tokens``: makes, lists and deletes tokens, and gives rights to certificates."""

from __future__ import annotations

import json
from pathlib import Path

from farpool.cluster.manager.credentials import find_identity, find_token
from farpool.cluster.manager.records import Role
from farpool.cluster.registry import open_registry
from tests.cli.here import command


def test_tokens_and_identities(tmp_path: Path) -> None:
    where = ("--registry", "registry.sqlite")

    def tokens(*words: str) -> str:
        done = command("tokens", *words, *where, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "no tokens and no identities; make a token" in tokens()
    refused = command("tokens", "create", "--role", "operator", *where, cwd=tmp_path)
    assert refused.returncode == 2
    assert "the first token must be one of an administrator" in refused.stderr
    made = command("tokens", "create", "--role", "admin", "--name", "ops", *where, cwd=tmp_path)
    token = made.stdout.strip()  # alone, for $(...)
    assert token.startswith("fp_")
    assert "with the role admin; it is shown only now" in made.stderr
    tokens("allow", "spiffe://example.org/trainer", "--role", "tenant", "--tenant", "3")
    listed = json.loads(tokens("--json"))
    assert [(one["kind"], one["role"], one["tenant"], one["name"]) for one in listed] == [
        ("token", "admin", None, "ops"),
        ("certificate", "tenant", 3, "spiffe://example.org/trainer"),
    ]
    assert "spiffe://example.org/trainer" in tokens()
    with open_registry(tmp_path / "registry.sqlite") as registry:
        found = find_token(registry, token)
        assert found is not None
        assert found.id == listed[0]["id"]
        allowed = find_identity(registry, "spiffe://example.org/trainer")
        assert allowed is not None
        assert allowed.credential is not None
        assert (allowed.credential.role, allowed.credential.tenant) == (Role.TENANT, 3)
    tokens("forbid", "spiffe://example.org/trainer")
    tokens("delete", listed[0]["id"])
    for words in (("forbid", "spiffe://example.org/trainer"), ("delete", listed[0]["id"])):
        assert command("tokens", *words, *where, cwd=tmp_path).returncode == 2
    assert json.loads(tokens("--json")) == []
