"""The copies of the registry's entries in a node's folder, as the policy of tenants has one."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from farpool.cluster.node.tenancy import FILE, PolicyCopy, policy_file
from farpool.cluster.tenants.follower import KnownPolicy
from farpool.cluster.tenants.records import BandwidthPolicy, MediumPolicy, TenantPolicy

COPY = PolicyCopy(
    policy=KnownPolicy(
        revision=12,
        tenants={
            3: TenantPolicy(name="web", media={"dram": MediumPolicy(10, 20)}, priority=4),
            2**32 - 1: TenantPolicy(name="batch", bandwidth=BandwidthPolicy(2.0, 10**9, 0)),
        },
        oversubscription={"dram": 1.5},
        others={"dram": 1 << 40},
    ),
    registry="etcd://10.0.0.1:2379/farpool",
    confirmed=1e9,
)


def test_a_copy_is_read_as_it_was_written_and_only_its_owner_can(tmp_path: Path) -> None:
    assert policy_file(tmp_path).read() is None
    policy_file(tmp_path).write(COPY)
    assert policy_file(tmp_path).read() == COPY
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    policy_file(tmp_path).remove()
    policy_file(tmp_path).remove()
    assert policy_file(tmp_path).read() is None


def test_a_copy_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    policy_file(tmp_path).write(COPY)
    (tmp_path / f"{FILE}.new").mkdir()
    with pytest.raises(OSError, match="directory"):
        policy_file(tmp_path).write(PolicyCopy(policy=KnownPolicy()))
    assert policy_file(tmp_path).read() == COPY


def test_every_damage_is_found(tmp_path: Path) -> None:
    policy_file(tmp_path).write(COPY)
    whole = (tmp_path / FILE).read_bytes()
    chance = random.Random(1)
    damaged = [b"", b"\n", whole[:-1], whole + b" ", bytes(len(whole)), whole[: len(whole) // 2]]
    for _ in range(300):
        place = chance.randrange(len(whole))
        damaged.append(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])
    for content in damaged:
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(ValueError, match="it "):
            policy_file(tmp_path).read()


@pytest.mark.parametrize("head", ["farpool-tenants 2 0", "farpool-tenants 1 1"])
def test_a_copy_of_a_later_release_is_not_used(tmp_path: Path, head: str) -> None:
    policy_file(tmp_path).write(COPY)
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content.replace(b"farpool-tenants 1 0", head.encode()))
    with pytest.raises(ValueError, match="it was written by a later release"):
        policy_file(tmp_path).read()


def test_a_whole_file_with_another_content_is_not_used(tmp_path: Path) -> None:
    for rest in (b"{}", b"[]", b'{"policy": {"tenants": {"x": {}}}}', b'{"policy": {"others": 5}}'):
        head = f"farpool-tenants 1 0 {hashlib.sha256(rest).hexdigest()}\n".encode()
        (tmp_path / FILE).write_bytes(head + rest)
        with pytest.raises(ValueError, match="it has another content"):
            policy_file(tmp_path).read()


def test_a_link_in_the_place_of_the_copy_is_not_followed(tmp_path: Path) -> None:
    policy_file(tmp_path).write(COPY)
    (tmp_path / FILE).rename(tmp_path / "elsewhere")
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        policy_file(tmp_path).read()
