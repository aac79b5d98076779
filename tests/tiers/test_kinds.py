"""Kinds of tiers come from a registry: the built-in ones, and those of a package outside of farpool."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from farpool import ConfigError, Dram, Nvme, Pool, PoolConfig, TierError, Verified
from farpool.memory.pool.lower_tiers import LowerTiers
from farpool.memory.tiers import DramSpec, NvmeSpec, RemoteSpec
from farpool.memory.tiers.kinds import GROUP, kind_names, load_kind
from farpool.testing import KindConformance

PACKAGE = Path(__file__).with_name("tier_package")
MIB = 1 << 20
BROKEN = {
    "gone": "there_is_no_such_module:Spec",
    "other": "builtins:dict",
    "misnamed": "slow_tier:SlowSpec",
    "dram": "slow_tier:SlowSpec",
}


def install(site: Path, name: str, entries: dict[str, str]) -> None:
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{kind} = {value}" for kind, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with installed packages, on the path of this process."""
    site = tmp_path_factory.mktemp("site")
    (site / "slow_tier.py").write_text((PACKAGE / "slow_tier.py").read_text())
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    install(site, project["name"], project["entry-points"][GROUP])
    install(site, "broken-tiers", BROKEN)
    install(site, "twin-tiers-a", {"twin": "twin_a:Spec"})
    install(site, "twin-tiers-b", {"twin": "twin_b:Spec"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield site
    sys.modules.pop("slow_tier", None)


class TestSlow(KindConformance):
    settings: ClassVar = {"kind": "slow", "size": "16MiB", "delay": 0.0001}


class TestBuiltInDram(KindConformance):
    settings: ClassVar = {"kind": "dram", "size": "16MiB"}

    def test_one_entry_point_offers_the_kind(self) -> None:
        # The package `broken-tiers` offers `dram`, too. The kit tells its author.
        with pytest.raises(AssertionError, match=r"expected one entry point, found .*slow_tier:SlowSpec"):
            super().test_one_entry_point_offers_the_kind()


class TestBuiltInNvme(KindConformance):
    settings: ClassVar = {"kind": "nvme", "size": "16MiB"}


def test_known_kinds_are_listed_without_importing_their_packages() -> None:
    program = (
        "import sys, farpool\n"
        "from farpool.memory.tiers.kinds import is_kind, kind_names\n"
        "with farpool.Pool(fast='1MiB', dram='1MiB'): pass\n"
        "assert is_kind('slow'), kind_names()\n"
        "assert {'dram', 'nvme', 'remote', 'slow', 'twin'} <= set(kind_names())\n"
        "assert 'slow_tier' not in sys.modules\n"
        "spec = farpool.PoolConfig.make(4096, slow='1MiB').tiers[0]\n"
        "assert type(spec).__module__ == 'slow_tier'\n"
    )
    site = next(path for path in sys.path if Path(path, "slow_tier.py").exists())
    program = f"import sys; sys.path.insert(0, {site!r})\n{program}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_kind_from_a_package_works_in_a_pool() -> None:
    with Pool(fast="256KiB", slow="8MiB") as pool:
        table = pool.full((1024, 1024), 2.0)
        assert pool.materialize(table).eq(2.0).all()
        (stats,) = pool.stats().tiers
        assert (stats.name, stats.kind, stats.capacity) == ("slow", "slow", 8 * MIB)
        assert stats.reserved > MIB
        assert any(line.startswith("slow ") for line in pool.explain().splitlines())
        del table


def test_a_pool_verifies_tiers_that_do_not_say_that_their_bytes_stay_in_the_process() -> None:
    lower = LowerTiers(PoolConfig.make(MIB, dram=MIB, slow=MIB).make_tiers())
    try:
        assert [type(tier) for tier in lower.tiers] == [Dram, Verified]
    finally:
        lower.close()


def test_the_lower_tiers_are_closed_also_if_one_of_them_cannot_be(tmp_path: Path) -> None:
    class Unclosable(Dram):
        def close(self) -> None:
            super().close()
            raise TierError("it cannot be closed", tier="dram")

    tiers = [Nvme(tmp_path / "a.pool", "1MiB"), Unclosable("1MiB"), Nvme(tmp_path / "c.pool", "1MiB")]
    lower = LowerTiers(tiers)
    with pytest.raises(TierError, match="it cannot be closed"):
        lower.close()
    assert list(tmp_path.iterdir()) == []
    missing = Nvme(tmp_path / "missing" / "d.pool", "1MiB")
    with pytest.raises(TierError, match="it cannot be closed"):
        LowerTiers([Nvme(tmp_path / "a.pool", "1MiB"), Unclosable("1MiB"), missing])
    assert list(tmp_path.iterdir()) == []


def test_short_forms_are_ordered_by_typical_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PoolConfig.make(MIB, nvme=MIB, slow=MIB, remote="a:1", dram=MIB)
    assert [tier.kind for tier in config.tiers] == ["dram", "slow", "remote", "nvme"]  # type: ignore[union-attr]
    assert config == PoolConfig.make(MIB, dram=MIB, slow=MIB, remote="a:1", nvme=MIB)
    for name, value in {"NVME": "1MiB", "SLOW": "1MiB", "REMOTE": "a:1", "DRAM": "1MiB", "FAST": "1MiB"}.items():
        monkeypatch.setenv(f"FARPOOL_{name}", value)
    assert PoolConfig.from_environment() == config
    assert PoolConfig.load(slow="2MiB").tiers == PoolConfig.make(MIB, slow=2 * MIB).tiers


def test_built_in_kinds_are_loaded_as_any_other() -> None:
    assert [load_kind(name, "kind") for name in ("dram", "nvme", "remote")] == [DramSpec, NvmeSpec, RemoteSpec]


def test_an_unknown_kind_names_the_known_ones_and_how_to_get_another() -> None:
    known = ", ".join(kind_names())
    wanted = rf"tiers\[0\].kind is 'tape', expected one of {known}; packages add .* of the group {GROUP}"
    with pytest.raises(ConfigError, match=wanted):
        PoolConfig.make(MIB, [{"kind": "tape", "size": MIB}])
    with pytest.raises(ConfigError, match=rf"^tape is 1, but there is no such setting; .* a kind of tier \({known}\)"):
        Pool(fast=MIB, tape=1)
    with pytest.raises(ConfigError, match=r"tiers\[0\].kind is 3, expected one of"):
        PoolConfig.make(MIB, [{"kind": 3, "size": MIB}])


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("gone", r"the entry point gone = there_is_no_such_module:Spec of the package broken-tiers .*ModuleNotFound"),
        ("other", r"other = builtins:dict .*expected a subclass of farpool.tiers.TierSpec"),
        ("misnamed", r"the kind of slow_tier:SlowSpec is 'slow', expected 'misnamed'"),
        ("twin", r"the entry point twin = twin_a:Spec .* twin-tiers-a and .* twin = twin_b:Spec .* twin-tiers-b offer"),
    ],
)
def test_a_broken_package_is_named_and_other_pools_work(kind: str, match: str) -> None:
    for ask in (
        lambda: PoolConfig.make(MIB, [{"kind": kind, "size": MIB}]),
        lambda: PoolConfig.make(MIB, **{kind: MIB}),
        lambda: PoolConfig.from_environment({"FARPOOL_FAST": "1MiB", f"FARPOOL_{kind.upper()}": "1MiB"}),
    ):
        with pytest.raises(ConfigError, match=match):
            ask()
    with Pool(fast=MIB, dram=MIB, slow=MIB) as pool:
        assert [tier.kind for tier in pool.stats().tiers] == ["dram", "slow"]


def test_a_package_cannot_replace_a_built_in_kind() -> None:
    assert load_kind("dram", "kind") is DramSpec


def test_a_kind_without_a_short_form_says_how_to_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_kind("slow", "kind"), "short_form", "")
    with pytest.raises(ConfigError, match=r"slow has no short form; expected tiers=\[{'kind': 'slow', ...}\], with"):
        PoolConfig.make(MIB, slow=MIB)


def test_a_wrong_setting_of_a_kind_from_a_package_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\].dealy is 1, but there is no such setting; .* size, .*delay"):
        PoolConfig.make(MIB, [{"kind": "slow", "size": MIB, "dealy": 1}])
    with pytest.raises(ConfigError, match=r"tiers\[0\]: delay of slow is -1.0, expected 0 or more"):
        PoolConfig.make(MIB, [{"kind": "slow", "size": MIB, "delay": -1}])
    with pytest.raises(ConfigError, match=r"slow is 'much', expected"):
        PoolConfig.from_environment({"FARPOOL_FAST": "1MiB", "FARPOOL_SLOW": "much"})
