"""Programs that are killed, or stopped for longer than their lease, at each step of a publish or a sweep.

Each call of the registry and of the store is a step, so the tests are deterministic. A killed program does nothing
more. A stopped program goes on after its lease has ended and other programs have published, unpublished and swept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farpool.cluster.names import Names
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import FarpoolError, NameMissingError, RegistryUnwritableError
from tests.store.names.memory_store import MemoryStore

SETTINGS: dict[str, Any] = {"hold": 0.0, "lease": 3600.0, "timeout": 60.0, "orphan_ttl": 100.0}
CONTENTS = ([b"one", b"two"], [b"two", b"three"], [b"one", b"three", b"four"])
MOST_STEPS = 60


class KilledError(BaseException):
    """The program has ended."""


class SteppingRegistry(SqliteRegistry):
    """A registry whose calls are steps of one program."""

    def __init__(self, path: Path, step: Callable[[], None]) -> None:
        super().__init__(path, timeout=60.0)
        self.step = step

    def get(self, *arguments: Any, **settings: Any) -> Any:
        self.step()
        return super().get(*arguments, **settings)

    def range(self, *arguments: Any, **settings: Any) -> Any:
        self.step()
        return super().range(*arguments, **settings)

    def commit(self, *arguments: Any, **settings: Any) -> Any:
        self.step()
        return super().commit(*arguments, **settings)

    def grant(self, *arguments: Any, **settings: Any) -> Any:
        self.step()
        return super().grant(*arguments, **settings)


class SteppingStore:
    """A store whose calls are steps of one program."""

    def __init__(self, store: MemoryStore, step: Callable[[], None]) -> None:
        self._store, self.step = store, step

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("put_many", "touch_many"):
            return found

        def call(*arguments: object, **settings: object) -> object:
            self.step()
            return found(*arguments, **settings)

        return call


class World:
    """One store, one registry, and the programs that use them: `ours` takes steps, `theirs` never stops."""

    def __init__(self, path: Path) -> None:
        self.store = MemoryStore()
        self.registry = SqliteRegistry(path, timeout=60.0)
        self.theirs = Names(self.store, self.registry, writer="theirs", **SETTINGS)
        self.steps = 0
        self.at = 0
        self.act: Callable[[], None] = lambda: None
        self.stepping = SteppingRegistry(path, lambda: self.step())
        store: Any = SteppingStore(self.store, lambda: self.step())
        self.ours = Names(store, self.stepping, writer="ours", **SETTINGS)

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.at:
            self.act()

    def take_away(self) -> None:
        """End the lease of our program, as if it had not renewed it."""
        lease = self.ours._session._lease
        if lease:
            self.registry.revoke(lease)

    def verify(self) -> None:
        """Each name has all its objects, and nothing else is kept once a sweep has run."""
        # With a renewal, a program deletes the entries that it could not delete while the host refused to write. If the
        # host still refuses, this raises the reason.
        self.theirs._session.renew()
        self.theirs.sweep()
        self.theirs.sweep()
        self.store.evict()
        self.store.pass_time(1000.0)
        live: set[str] = set()
        for info in self.theirs.list_names():
            with self.theirs.open(info.name) as opened:
                assert opened.read() == b"".join(part for _, part in sorted(parts(opened.manifest, self.store)))
                live |= {piece.key for piece in opened.manifest.pieces}
        manifests = {key for key in self.store.kept if self.store.objects[key][0].startswith(b"FPNAME")}
        assert self.store.kept - manifests == live
        assert len(manifests) <= len(self.theirs.list_names())
        self.theirs._session.renew()
        assert not self.registry.range("released/", "hold/", "writer/").entries

    def close(self) -> None:
        self.theirs.close()
        self.ours.close()
        self.stepping.close()
        self.registry.close()


def parts(manifest: Any, store: MemoryStore) -> list[tuple[int, bytes]]:
    return [(place, store.objects[piece.key][0]) for place, piece in enumerate(manifest.pieces)]


def publishes(world: World, others: Callable[[World], None]) -> None:
    """Our program publishes; `others` happen at one of its steps."""
    world.act = lambda: others(world)
    with contextlib.suppress(KilledError, FarpoolError):
        world.ours.publish("n", CONTENTS[1])


def sweeps(world: World, others: Callable[[World], None]) -> None:
    """Our program sweeps versions of other programs; `others` happen at one of its steps."""
    world.theirs.publish("n", CONTENTS[0])
    world.theirs.publish("m", CONTENTS[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.theirs, "sweep", lambda: 0)
        world.theirs.publish("n", CONTENTS[2])
        world.theirs.unpublish("m")
    world.act = lambda: others(world)
    with contextlib.suppress(KilledError, FarpoolError):
        world.ours.sweep()


def killed(world: World) -> None:
    def nothing() -> None:
        raise KilledError

    world.take_away()
    world.step = nothing  # type: ignore[method-assign]
    raise KilledError


def published_the_same(world: World) -> None:
    world.take_away()
    world.theirs.publish("other", CONTENTS[1])


def published_and_took_away(world: World) -> None:
    world.take_away()
    world.theirs.publish("n", CONTENTS[1])
    world.theirs.unpublish("n")
    world.theirs.sweep()


def swept(world: World) -> None:
    world.take_away()
    world.theirs.sweep()
    world.store.pass_time(50.0)


def swept_and_published(world: World) -> None:
    swept(world)
    for name, content in zip("nmo", CONTENTS, strict=True):
        world.theirs.publish(name, content)


@pytest.mark.parametrize(
    "others",
    [killed, published_the_same, published_and_took_away, swept, swept_and_published],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize("work", [publishes, sweeps], ids=lambda one: one.__name__)
def test_a_program_that_was_stopped_or_killed_at_any_step_changes_nothing_later(
    tmp_path: Path, work: Callable[..., None], others: Callable[[World], None]
) -> None:
    for at in range(1, MOST_STEPS):
        world = World(tmp_path / f"{at}.sqlite")
        world.at = at
        with contextlib.closing(world):
            work(world, others)
            world.verify()
            if world.steps < at:
                break
    else:
        pytest.fail("the program takes more steps than were expected")
    assert at > 6


def test_a_full_disk_at_the_end_of_a_publish_leaves_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(1, MOST_STEPS):
        with contextlib.closing(World(tmp_path / f"{at}.sqlite")) as world:
            commit, commits = world.registry.commit, 0

            def full(*arguments: Any, at: int = at, commit: Any = commit, **settings: Any) -> Any:
                nonlocal commits
                commits += 1
                if commits >= at:
                    raise RegistryUnwritableError("the disk is full")
                return commit(*arguments, **settings)

            with monkeypatch.context() as patch:
                patch.setattr(world.registry, "commit", full)
                with contextlib.suppress(RegistryUnwritableError):
                    world.theirs.publish("n", CONTENTS[0])
            world.verify()
            if commits < at:
                break
    assert at > 4


def test_no_publish_waits_for_a_program_that_died_while_it_swept(tmp_path: Path) -> None:
    for at in range(1, MOST_STEPS):
        world = World(tmp_path / f"{at}.sqlite")
        world.at, world.take_away = at, lambda: None  # type: ignore[method-assign]  # its lease has not ended
        with contextlib.closing(world):
            sweeps(world, killed)
            before = world.theirs.publish("p", b"value").version
            assert before == 1
            if world.steps < at:
                break
    assert at > 6


def test_opening_an_older_version_protects_it_from_a_sweep_at_any_step(tmp_path: Path) -> None:
    opens = 0
    for at in range(1, MOST_STEPS):
        world = World(tmp_path / f"{at}.sqlite")
        world.at = at
        opened: list[Any] = []

        def others(world: World, opened: list[Any] = opened) -> None:
            with contextlib.suppress(NameMissingError):
                opened.append(world.theirs.open("n", 1))

        with contextlib.closing(world):
            sweeps(world, others)
            world.store.evict()
            world.store.pass_time(50.0)
            for one in opened:
                assert one.read() == b"".join(CONTENTS[0])
                one.close()
            opens += len(opened)
            world.verify()
            if world.steps < at:
                break
    assert 1 < opens < at


def test_a_late_keep_of_a_writer_that_has_given_up_keeps_nothing(tmp_path: Path) -> None:
    world = World(tmp_path / "registry")
    late: list[Any] = []
    touch_many = world.store.touch_many

    def lost(keys: Any, ttl: float | None, **settings: Any) -> Any:
        if settings.get("keep"):
            late.append((list(keys), ttl, settings))
            raise TimeoutError("no answer")
        return touch_many(keys, ttl, **settings)

    with contextlib.closing(world), pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.store, "touch_many", lost)
        with pytest.raises(TimeoutError):
            world.ours.publish("n", CONTENTS[0])
        patch.undo()
        world.theirs.sweep()
        ((keys, ttl, settings),) = late
        assert world.store.touch_many(keys, ttl, **settings).copies == [0] * len(keys)
        assert not world.store.kept
        world.verify()


def stopped_before_keep(world: World) -> tuple[Any, ...]:
    """Publish as a program that is stopped just before it tells the node to keep its objects; return that request."""
    late: list[tuple[Any, ...]] = []
    touch_many = world.store.touch_many

    def lost(keys: Any, ttl: float | None, **settings: Any) -> Any:
        if settings.get("keep"):
            late.append((list(keys), ttl, settings))
            raise KilledError
        return touch_many(keys, ttl, **settings)

    with pytest.MonkeyPatch.context() as patch, Names(world.store, world.registry, writer="late", **SETTINGS) as names:
        patch.setattr(world.store, "touch_many", lost)
        patch.setattr(names, "sweep", lambda: 0)
        with pytest.raises(KilledError):
            names.publish("n", b"value")
    (request,) = late
    return request


def retired_only(world: World) -> None:
    """Sweep as a program that is killed when it has moved versions to ``released/``."""

    def nothing() -> None:
        raise KilledError

    store: Any = SteppingStore(world.store, nothing)
    with contextlib.suppress(KilledError), Names(store, world.registry, writer="killed", **SETTINGS) as names:
        names.sweep()


def test_sweeps_know_each_object_that_a_stopped_writer_keeps_late(tmp_path: Path) -> None:
    """A sweep that saw no copy of an object deletes no entry of a later version with that object."""
    for at in range(1, MOST_STEPS):
        world = World(tmp_path / f"{at}.sqlite")
        late: list[Any] = []

        def others(world: World, late: list[Any] = late) -> None:
            late.append(stopped_before_keep(world))
            retired_only(world)

        with contextlib.closing(world):
            stopped_before_keep(world)
            world.store.evict()
            world.at, world.act = at, lambda world=world, others=others: others(world)  # type: ignore[misc]
            world.ours.sweep()
            for keys, ttl, settings in late:
                world.store.touch_many(keys, ttl, **settings)
            world.verify()
            if world.steps < at:
                break
    assert at > 4


def test_a_publish_waits_for_a_sweep_of_an_earlier_release_and_names_it(tmp_path: Path) -> None:
    from farpool.cluster.names.records import SWEEPER, Holder, encode
    from farpool.cluster.registry import Condition, Put
    from farpool.errors import NameHeldError

    world = World(tmp_path / "registry")
    settings = {**SETTINGS, "timeout": 0.2}
    with contextlib.closing(world), Names(world.store, world.registry, writer="hasty", **settings) as hasty:
        lease = world.registry.grant(3600.0)
        world.registry.commit([Condition(SWEEPER, 0)], [Put(SWEEPER, encode(Holder("old@host")), lease)])
        with pytest.raises(NameHeldError, match=r"waits for old@host, .* until \d\d:\d\d:\d\d UTC") as error:
            hasty.publish("n", b"value")
        assert error.value.holder == "old@host"
        world.registry.revoke(lease)
        assert world.theirs.publish("n", b"value").version == 1
