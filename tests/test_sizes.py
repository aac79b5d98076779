import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool.errors import ConfigError
from farpool.sizes import format_size, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (2**40, 2**40),
        ("512", 512),
        ("512B", 512),
        ("64MiB", 64 << 20),
        ("64mib", 64 << 20),
        ("  1.5 GiB ", 3 << 29),
        ("2GB", 2_000_000_000),
        ("1KB", 1000),
        (".5KiB", 512),
        ("1.KiB", 1024),
        ("1TiB", 1 << 40),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_as_people_write_them(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


NO_NUMBERS = [
    "",
    "MiB",
    "1 MiB 2",
    "1e3",
    "inf",
    "nan",
    "1XiB",
    "\N{ARABIC-INDIC DIGIT ONE}MiB",
    1.5,
    None,
    True,
    False,
]
OUT_OF_RANGE = [0, -1, "0", "0.0GiB", "0.1B", "-1MiB", "9" * 40, "9" * 5000, "99999999PiB", 2**63]


@pytest.mark.parametrize("value", NO_NUMBERS + OUT_OF_RANGE, ids=lambda value: str(value)[:20])
def test_what_is_no_size_is_refused_by_name_and_with_an_example(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^budget is ") as caught:
        parse_size(value, "budget")  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)
    assert "'64MiB'" in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (1_234_567, "1.18 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (100 << 30, "100 GiB"),
        (-2048, "-2 KiB"),
        (2**70, "1048576 PiB"),
    ],
)
def test_sizes_are_written_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(1, 2**60))
def test_what_is_written_reads_back_nearly_the_same(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes * 0.006


@pytest.mark.parametrize(
    ("value", "rate"),
    [
        ("2GB/s", 2e9),
        (" 1.5 GiB/s ", 1.5 * 2**30),
        ("500MB", 5e8),
        ("0.5 gb /s", 5e8),
        (1e9, 1e9),
        (7, 7.0),
        (1.5, 1.5),
    ],
)
def test_rates_are_read_as_people_write_them(value: float | str, rate: float) -> None:
    assert parse_rate(value) == rate


@pytest.mark.parametrize(
    "value", ["", "/s", "fast", "2GB/h", "2GB/s/s", "0/s", 0, 0.5, -1, float("inf"), float("nan"), 1e300, True, None]
)
def test_what_is_no_rate_is_refused_by_name_and_with_an_example(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^link is ") as caught:
        parse_rate(value, "link")  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)
    assert "'2GB/s'" in str(caught.value)
