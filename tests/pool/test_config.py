"""Keywords, a TOML file and the environment give the same configuration, or an error that says what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import fields
from rich.pretty import pretty_repr

from farpool import ConfigError, Dram, Nvme, Pool, PoolConfig, Remote, Throttled, Traced, Verified
from farpool.memory.tiers import DramSpec, NvmeSpec, RemoteSpec, ThrottledSpec, TracedSpec

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FAST", "DRAM", "REMOTE", "NVME", "DEVICE", "PREFETCH", "TIMEOUT", "DEBUG", "CONFIG"):
        monkeypatch.delenv(f"FARPOOL_{name}", raising=False)


def toml(folder: Path, text: str) -> Path:
    path = folder / "farpool.toml"
    path.write_text(text)
    return path


def test_three_ways_give_equal_configurations(tmp_path: Path) -> None:
    keywords = PoolConfig.make("8MiB", dram="64MiB", nvme=128 * MIB, prefetch=False, timeout=5)
    file = PoolConfig.from_toml(
        toml(tmp_path, '[pool]\nfast = 8388608\ndram = "64 mib"\nnvme = "128MiB"\nprefetch = false\ntimeout = 5.0\n')
    )
    environment = PoolConfig.from_environment(
        {
            "FARPOOL_FAST": "8MiB",
            "FARPOOL_DRAM": str(64 * MIB),
            "FARPOOL_NVME": "128MiB",
            "FARPOOL_PREFETCH": "false",
            "FARPOOL_TIMEOUT": "5",
        }
    )
    assert keywords == file == environment
    assert len({keywords, file, environment}) == 1
    assert keywords != keywords.replace(nvme="1GiB")
    assert type(environment.timeout) is float


def test_tiers_in_a_file_equal_those_in_the_program(tmp_path: Path) -> None:
    file = PoolConfig.from_toml(
        toml(
            tmp_path,
            f"""
            [pool]
            fast = "1MiB"

            [[pool.tiers]]
            kind = "dram"
            size = "2MiB"
            verified = true

            [[pool.tiers]]
            kind = "nvme"
            size = "4MiB"
            path = "{tmp_path}/./far.pool"
            name = "disk"
            direct = false
            throttled = {{ read_bandwidth = "2GB/s", latency = 0.001, shared = true }}
            traced = {{ path = "{tmp_path}/trace.jsonl" }}
            """,
        )
    )
    disk = NvmeSpec(
        size=4 * MIB,
        path=f"{tmp_path}/far.pool",
        name="disk",
        direct=False,
        throttled=ThrottledSpec(read_bandwidth=2e9, latency=1e-3, shared=True),
        traced=TracedSpec(path=f"{tmp_path}/trace.jsonl"),
    )
    assert file == PoolConfig.make(MIB, [DramSpec(size="2MiB", verified=True), disk])
    assert file == PoolConfig.make(MIB, [{"kind": "dram", "size": 2 * MIB, "verified": True}, disk])
    first, second = file.make_tiers()
    assert isinstance(first, Verified)
    assert isinstance(first.inner, Dram)
    assert isinstance(second, Traced)
    assert isinstance(second.inner, Throttled)
    assert isinstance(second.inner.inner, Nvme)
    assert second.inner.inner.path == str(tmp_path / "far.pool")
    assert (second.info.name, second.info.read_bandwidth, second.info.latency) == ("disk", 2e9, 1e-3)


def test_remote_tiers_in_a_file_equal_those_in_the_program(tmp_path: Path) -> None:
    file = PoolConfig.from_toml(
        toml(
            tmp_path,
            """
            [pool]
            fast = "1MiB"

            [[pool.tiers]]
            kind = "remote"
            nodes = ["A:7471", "tcp://b:7471"]
            size = "6MiB"
            key = "trainer:0123456789abcdef"
            timeout = 2
            transport = "tcp"
            throttled = { latency = 0.001 }
            """,
        )
    )
    spec = RemoteSpec(
        nodes="tcp://a:7471, b:7471",
        size=6 * MIB,
        key="trainer:0123456789abcdef",
        timeout=2.0,
        transport="tcp",
        throttled=ThrottledSpec(latency=1e-3),
    )
    assert file == PoolConfig.make(MIB, [spec])
    assert hash(file) == hash(PoolConfig.make(MIB, [spec]))
    assert "0123456789abcdef" not in repr(file) + pretty_repr(file)
    (tier,) = file.make_tiers()
    assert isinstance(tier, Throttled)
    assert isinstance(tier.inner, Remote)
    assert tier.inner.nodes == ("tcp://a:7471", "tcp://b:7471")
    assert (tier.info.name, tier.info.capacity) == ("remote", 6 * MIB)


def test_the_short_form_of_a_remote_tier_is_equal_in_three_ways(tmp_path: Path) -> None:
    expected = PoolConfig.make(MIB, [DramSpec(size=MIB), RemoteSpec(nodes=("tcp://a:1", "tcp://b:2"))])
    assert PoolConfig.make(MIB, dram=MIB, remote=["a:1", "b:2"]) == expected
    assert PoolConfig.make(MIB, dram=MIB, remote="tcp://a:1,b:2") == expected
    assert PoolConfig.make(MIB, dram=MIB, remote=" a:1, b:2,") == expected
    lines = '[pool]\nfast = "1MiB"\ndram = "1MiB"\nremote = '
    assert PoolConfig.from_toml(toml(tmp_path, lines + '"a:1, b:2"\n')) == expected
    assert PoolConfig.from_toml(toml(tmp_path, lines + '["a:1", "b:2"]\n')) == expected
    variables = {"FARPOOL_FAST": "1MiB", "FARPOOL_DRAM": "1MiB", "FARPOOL_REMOTE": "a:1,b:2"}
    assert PoolConfig.from_environment(variables) == expected
    assert expected.replace(nvme=MIB).tiers == (NvmeSpec(size=MIB),)


def test_a_pool_from_a_file_works_and_can_be_made_twice(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        f'[pool]\nfast = "1MiB"\n[[pool.tiers]]\nkind = "nvme"\nsize = "4MiB"\npath = "{tmp_path}/far.pool"\n'
        f'[[pool.tiers]]\nkind = "dram"\nsize = "4MiB"\ntraced = {{ path = "{tmp_path}/trace.jsonl" }}\n',
    )
    config = PoolConfig.from_toml(path)
    for made_from in (path, config, str(path)):
        with Pool.from_config(made_from) as pool:
            assert pool.config == config
            assert pool.fast == MIB
            assert [tier.name for tier in pool.stats().tiers] == ["nvme", "dram"]
            assert (tmp_path / "far.pool").exists()
            assert (tmp_path / "trace.jsonl").exists()
        assert not (tmp_path / "far.pool").exists()


def test_arguments_win_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toml(tmp_path, '[pool]\nfast = "1MiB"\ndram = "2MiB"\ntimeout = 1\nprefetch = false\n')
    monkeypatch.setenv("FARPOOL_CONFIG", str(path))
    monkeypatch.setenv("FARPOOL_FAST", "3MiB")
    monkeypatch.setenv("FARPOOL_TIMEOUT", "2")
    monkeypatch.setenv("FARPOOL_DEVICE", "")
    assert PoolConfig.from_environment() == PoolConfig.make("3MiB", dram="2MiB", timeout=2, prefetch=False)
    with Pool(timeout=3) as pool:
        assert pool.config == PoolConfig.make("3MiB", dram="2MiB", timeout=3, prefetch=False)
    other = tmp_path / "other.toml"
    other.write_text('[pool]\nfast = "5MiB"\n')
    with Pool.from_config(other, timeout=4) as pool:
        assert pool.config == PoolConfig.make("3MiB", timeout=4)
    with Pool("4MiB") as pool:
        assert pool.config == PoolConfig.make("4MiB")


@pytest.mark.parametrize("value", ["1", "true", "True", "0", "false"])
def test_truth_in_the_environment_is_written_in_the_usual_ways(value: str) -> None:
    config = PoolConfig.from_environment({"FARPOOL_FAST": "1MiB", "FARPOOL_PREFETCH": value})
    assert config.prefetch is (value.lower() in ("1", "true"))


def test_every_setting_of_a_pool_can_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    # Whatever has a default that text can stand for: so a new setting needs no change where settings are read.
    defaults = {field.name: field.default for field in fields(PoolConfig) if field.name not in ("fast", "tiers")}
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in defaults.items()
    ]
    file = PoolConfig.from_toml(toml(tmp_path, "\n".join(["[pool]", "fast = 4096", *lines])))
    variables = {f"FARPOOL_{name.upper()}": str(value) for name, value in defaults.items()}
    assert len(variables) >= 3
    assert file == PoolConfig.from_environment({"FARPOOL_FAST": "4096", **variables}) == PoolConfig(4096)


def test_the_lower_tiers_are_one_setting(tmp_path: Path) -> None:
    path = toml(tmp_path, '[pool]\nfast = "1MiB"\n[[pool.tiers]]\nkind = "dram"\nsize = "2MiB"\n')
    config = PoolConfig.load(path, environment={"FARPOOL_NVME": "8MiB"})
    assert config.tiers == (NvmeSpec(size="8MiB"),)
    config = PoolConfig.load(path, environment={"FARPOOL_NVME": "8MiB"}, dram="4MiB")
    assert config.tiers == (DramSpec(size="4MiB"),)
    assert config.replace(nvme="1MiB").tiers == (NvmeSpec(size="1MiB"),)
    tier = Dram("1MiB")
    assert config.replace(tiers=[tier]).make_tiers() == [tier]


def test_a_file_tier_without_a_path_gets_a_new_file_each_time() -> None:
    spec = NvmeSpec(size="1MiB")
    first, second = spec.make(), spec.make()
    assert isinstance(first, Nvme)
    assert isinstance(second, Nvme)
    assert first.path != second.path
    assert spec == NvmeSpec(size=MIB, name="nvme")


def test_a_configuration_cannot_be_changed() -> None:
    config = PoolConfig.make("1MiB", dram="1MiB")
    with pytest.raises(AttributeError, match="immutable"):
        config.fast = 1  # type: ignore[misc]
    with pytest.raises(AttributeError, match="immutable"):
        config.tiers[0].size = 1  # type: ignore[misc, union-attr]
    assert config == PoolConfig.make("1MiB", dram="1MiB")


WRONG_FILES = {
    "no TOML": ("[pool\n", r"is no TOML: .*line 1"),
    "no text": ("[pool]\nfast = '\udcff'\n", r"is no TOML"),
    "no table": ("", r"there is no \[pool\], expected a table \[pool\] of fast, tiers"),
    "a setting outside of the table": ('fast = "1MiB"\n', r"fast is '1MiB', but there is no such setting; .*\[pool\]"),
    "no budget": ("[pool]\ntimeout = 3\n", r"fast is not given; pass Pool\(fast=...\)"),
    "a misspelt setting": (
        "[pool]\nfast = 1\nprefecth = true\n",
        r"pool.prefecth is True, .* expected one of .*prefetch",
    ),
    "no size": ('[pool]\nfast = "much"\n', r"\[pool\]: fast is 'much', expected"),
    "a fraction of a byte": ("[pool]\nfast = 1.5\n", r"\[pool\]: fast is 1.5, expected"),
    "no truth value": ('[pool]\nfast = 4096\nprefetch = "yes"\n', r"\[pool\]: prefetch is 'yes', expected `bool`"),
    "no number": ("[pool]\nfast = 4096\ntimeout = true\n", r"\[pool\]: timeout is True, expected `float`"),
    "no time": ("[pool]\nfast = 4096\ntimeout = 0\n", r"\[pool\]: timeout is 0.0, expected seconds above 0"),
    "an unknown device": ('[pool]\nfast = 4096\ndevice = "tpu"\n', r"\[pool\]: device: 'tpu' is not known; .*cuda"),
    "a tier that is too small": ("[pool]\nfast = 4096\nnvme = 1\n", r"\[pool\]: .*nvme is 1 bytes, expected 4096"),
    "tiers twice": ("[pool]\nfast = 4096\ndram = 4096\ntiers = []\n", r"\[pool\]: tiers= and the shorthand"),
    "no list of tiers": ("[pool]\nfast = 4096\n[pool.tiers]\nsize = 1\n", r"tiers is {'size': 1}, expected a list"),
    "a name twice": (
        '[pool]\nfast = 4096\n[[pool.tiers]]\nkind = "dram"\nsize = 64\n[[pool.tiers]]\nkind = "dram"\nsize = 64\n',
        r"\[pool\]: tiers: the name 'dram' is used twice",
    ),
}
WRONG_TIERS = {
    "no kind": ("size = 64", r"tiers\[0\].kind is missing, expected one of dram, nvme"),
    "an unknown kind": ('kind = "hbm"', r"tiers\[0\].kind is 'hbm', expected one of dram, nvme"),
    "neither size nor path": ('kind = "nvme"', r"tiers\[0\].size is missing, expected size, .*path"),
    "no size": ('kind = "dram"\nsize = "big"', r"tiers\[0\]: size of dram is 'big', expected"),
    "a size of another type": ('kind = "dram"\nsize = true', r"tiers\[0\].size is True, expected `int \| str`"),
    "a path of another type": ('kind = "nvme"\nsize = 4096\npath = 3', r"tiers\[0\].path is 3, expected `str \| null`"),
    "a path for memory": (
        'kind = "dram"\nsize = 64\npath = "a"',
        r"tiers\[0\].path is 'a', but there is no such setting",
    ),
    "a misspelt key": ('kind = "dram"\nsiez = 64', r"tiers\[0\].siez is 64, but there is no such .* expected size"),
    "no table of a wrapper": (
        'kind = "dram"\nsize = 64\nthrottled = true',
        r"tiers\[0\].throttled is True, expected a tab",
    ),
    "a misspelt key of a wrapper": (
        'kind = "dram"\nsize = 64\nthrottled = {latenzy = 1}',
        r"tiers\[0\].throttled.latenzy is 1, .* expected read_bandwidth",
    ),
    "no rate": (
        'kind = "dram"\nsize = 64\nthrottled = {read_bandwidth = "fast"}',
        r"tiers\[0\].throttled: read_bandwidth is 'fast', expected",
    ),
    "a negative latency": ('kind = "dram"\nsize = 64\nthrottled = {latency = -1}', r"tiers\[0\]: latency is -1.0"),
    "no nodes": ('kind = "remote"', r"tiers\[0\].nodes is missing, expected size, .*nodes"),
    "no address of a node": ('kind = "remote"\nnodes = ["x"]', r"tiers\[0\]: nodes of remote is 'x', expected an add"),
    "nodes of another type": ('kind = "remote"\nnodes = 3', r"tiers\[0\].nodes is 3, expected `str \| array`"),
    "an unknown transport": (
        'kind = "remote"\nnodes = "a:1"\ntransport = "pigeon"',
        r"tiers\[0\]: transport of remote is 'pigeon', expected auto, mapped, tcp or the name of an installed",
    ),
    "a trace without a path": ('kind = "dram"\nsize = 64\ntraced = {}', r"tiers\[0\].traced.path is missing"),
}
WRONG = WRONG_FILES | {
    name: (f"[pool]\nfast = 4096\n[[pool.tiers]]\n{text}\n", rf"\[pool\]: {match}")
    for name, (text, match) in WRONG_TIERS.items()
}


@pytest.mark.parametrize(("text", "match"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_is_refused_by_its_name_the_setting_and_the_value(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "farpool.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=match) as caught:
        PoolConfig.from_toml(path)
    if "fast is not given" not in str(caught.value):
        assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no.toml cannot be read: No such file"):
        Pool.from_config(tmp_path / "no.toml")


WRONG_VARIABLES = {
    "FARPOOL_FAST": ("much", "fast is 'much', expected"),
    "FARPOOL_DRAM": ("1", "capacity of dram is 1 bytes"),
    "FARPOOL_NVME": ("-1MiB", "nvme is '-1MiB', expected"),
    "FARPOOL_REMOTE": ("there", "nodes of remote is 'there', expected an address"),
    "FARPOOL_DEVICE": ("tpu", "device: 'tpu' is not known"),
    "FARPOOL_PREFETCH": ("perhaps", "FARPOOL_PREFETCH is 'perhaps', expected `bool`"),
    "FARPOOL_TIMEOUT": ("1 minute", "FARPOOL_TIMEOUT is '1 minute', expected `float`"),
    "FARPOOL_CONFIG": ("/no/farpool.toml", "/no/farpool.toml cannot be read"),
}


@pytest.mark.parametrize("variable", WRONG_VARIABLES)
def test_a_wrong_variable_is_refused_by_its_name_and_value(variable: str) -> None:
    value, match = WRONG_VARIABLES[variable]
    with pytest.raises(ConfigError, match=re.escape(match)) as caught:
        PoolConfig.from_environment({"FARPOOL_FAST": "1MiB", variable: value})
    assert variable in str(caught.value)


def test_a_pool_without_any_setting_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError, match=r"Pool\(fast=...\), set FARPOOL_FAST, .* FARPOOL_CONFIG"):
        Pool()


@pytest.mark.parametrize("name", ["path", "environment"])
def test_a_pool_takes_no_file_and_no_environment_as_a_short_form(tmp_path: Path, name: str) -> None:
    given = {"path": str(toml(tmp_path, '[pool]\nfast = "1MiB"\n')), "environment": {"FARPOOL_FAST": "1MiB"}}[name]
    with pytest.raises(TypeError, match=name):
        Pool(**{name: given})  # type: ignore[arg-type]


def test_a_wrong_argument_over_a_right_file_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, '[pool]\nfast = "1MiB"\ntimeout = 3\n')
    with pytest.raises(ConfigError, match=r"^timeout is 'soon'"):
        PoolConfig.load(path, environment={}, timeout="soon")
    with pytest.raises(ConfigError, match=r"^tmieout is 3, but there is no such setting; expected one of fast, tiers"):
        PoolConfig.load(path, environment={}, tmieout=3)
    with pytest.raises(ConfigError, match=r"^tmieout is 3"):
        PoolConfig(4096).replace(tmieout=3)
