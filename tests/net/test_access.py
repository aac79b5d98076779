"""Where access keys come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from farpool.cluster.wire.access import AccessKey, Grant, client_key, load_keys
from farpool.cluster.wire.frames import Right
from farpool.errors import ConfigError

SECRET = "0123456789abcdef"
FILE = f"""
[keys.trainer]
secret = "{SECRET}"
rights = ["read", "write", "publish"]
tenant = 3

[keys.monitor]
secret = "{SECRET[::-1]}"
rights = ["admin"]
"""


def private(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o600)
    return path


def test_a_file_gives_names_secrets_rights_and_tenants(tmp_path: Path) -> None:
    assert load_keys(private(tmp_path / "keys.toml", FILE)) == {
        "trainer": Grant(SECRET.encode(), Right.READ | Right.WRITE | Right.PUBLISH, 3),
        "monitor": Grant(SECRET[::-1].encode(), Right.ADMIN, 0),
    }


@pytest.mark.parametrize(("written", "nbytes"), [("3000", 3000), ('"4GiB"', 4 << 30)])
def test_a_file_can_say_how_many_bytes_a_key_may_hold(tmp_path: Path, written: str, nbytes: int) -> None:
    grants = load_keys(private(tmp_path / "keys.toml", entry(rest=f"bytes = {written}")))
    assert grants["a"].bytes == nbytes


def test_a_file_can_give_a_key_the_latency_class(tmp_path: Path) -> None:
    text = entry() + entry(name="b", rest='class = "latency"') + entry(name="c", rest='class = "bulk"')
    grants = load_keys(private(tmp_path / "keys.toml", text))
    assert [grants[name].latency for name in "abc"] == [False, True, False]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_use_is_refused_with_the_command_that_helps(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "keys.toml", FILE)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}.*chmod 600 {path}"):
        load_keys(path)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        client_key(environment={"FARPOOL_KEY_FILE": str(path)})


def entry(secret: str = f'"{SECRET}"', rights: str = '["read"]', name: str = "a", rest: str = "") -> str:
    return f"[keys.{name}]\nsecret = {secret}\nrights = {rights}\n{rest}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has nothing, expected"),
        ("[key.a]\n", r"has key, expected \[keys.NAME\]"),
        ("keys = 3\n", "expected"),
        ("[keys.a\n", "is no TOML"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (entry(secret='"short"'), "keys.a has a secret of 5 bytes, expected at least 16"),
        (entry(secret="5"), r"keys.a: .*`str`.*\$.secret"),
        (entry(rights='["raed"]'), "keys.a.rights has 'raed', expected some of read, write, publish, admin, repair"),
        (entry(rights='["READ"]'), "has 'READ'"),
        (entry(rest="tennant = 3"), "unknown field `tennant`"),
        (entry(rest="tenant = -1"), r"\$.tenant"),
        (entry(rest='bytes = "much"'), "keys.a.bytes is 'much', expected a number of bytes or a size"),
        (entry(rest="bytes = 0"), "keys.a.bytes is 0, expected at least 1 byte"),
        (entry(rest="bytes = 1.5"), r"\$.bytes"),
        (entry(rest='class = "fast"'), r"Invalid enum value 'fast'.*\$.class"),
        (entry(name='"a b"'), "has the name 'a b'"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = private(tmp_path / "keys.toml", text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_keys(path)
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_keys(tmp_path / "none")
    with pytest.raises(ConfigError, match="is no file"):
        load_keys("/dev/null")


def test_a_file_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "keys.toml", "#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        load_keys(path)


def test_a_key_is_a_name_a_colon_and_a_secret() -> None:
    assert AccessKey.parse(f"trainer:{SECRET}:more") == AccessKey("trainer", f"{SECRET}:more".encode())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SECRET, "has no colon"),
        (f":{SECRET}", "has the name ''"),
        ("trainer:tooshort", "8 bytes, expected at least 16"),
    ],
)
def test_what_is_no_key_is_refused_without_repeating_the_secret(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        AccessKey.parse(text, "--key")
    assert "--key" in str(caught.value)
    assert text.rpartition(":")[2] not in str(caught.value)


def test_the_argument_wins_over_the_environment() -> None:
    environment = {"FARPOOL_KEY": f"env:{SECRET}"}
    assert client_key(f"arg:{SECRET}", environment) == AccessKey("arg", SECRET.encode())
    assert client_key(AccessKey("arg", SECRET.encode()), environment) == AccessKey("arg", SECRET.encode())
    assert client_key(None, environment) == AccessKey("env", SECRET.encode())


def test_without_a_key_there_is_none() -> None:
    assert client_key(None, {"FARPOOL_KEY": "", "FARPOOL_KEY_FILE": ""}) is None


def test_a_key_file_holds_one_line(tmp_path: Path) -> None:
    path = private(tmp_path / "key", f"file:{SECRET}\n")
    assert client_key(None, {"FARPOOL_KEY_FILE": str(path)}) == AccessKey("file", SECRET.encode())


def test_two_variables_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FARPOOL_KEY and FARPOOL_KEY_FILE are both set"):
        client_key(None, {"FARPOOL_KEY": f"env:{SECRET}", "FARPOOL_KEY_FILE": str(tmp_path)})


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="FARPOOL_KEY has no colon"):
        client_key(None, {"FARPOOL_KEY": "nothing"})


def test_only_a_key_of_tenant_0_may_have_the_right_to_repair(tmp_path: Path) -> None:
    path = private(tmp_path / "keys.toml", entry(rights='["repair"]'))
    assert load_keys(path)["a"].rights == Right.REPAIR
    with pytest.raises(ConfigError, match="the right 'repair' and the tenant 5, expected tenant 0"):
        load_keys(private(tmp_path / "keys.toml", entry(rights='["repair"]', rest="tenant = 5")))
