"""The choice whether to compress: exact for steady rates, steady for varying ones."""

from __future__ import annotations

import random

import pytest

from farpool.kv.compression_choice import CompressionChoice

MIB = 1 << 20


def measured(
    choice: CompressionChoice, link: float, codec: float, ratio: float, rounds: int = 40, spread: float = 0.0
) -> list[bool]:
    """Feed rates in bytes per second, each varied by up to `spread` of it; return the decisions."""
    varied = random.Random(7)

    def seconds(nbytes: float, rate: float) -> float:
        return nbytes / rate * (1 + varied.uniform(-spread, spread))

    decisions = []
    for _ in range(rounds):
        stored = round(MIB / ratio)
        choice.sent(MIB, seconds(MIB, link), MIB)
        choice.received(MIB, seconds(MIB, link), MIB)
        choice.encoded(MIB, stored, seconds(MIB, codec))
        choice.decoded(MIB, seconds(MIB, codec))
        decisions.append(choice.pays())
    return decisions


@pytest.mark.parametrize("codec", [0.5e9, 2e9])
@pytest.mark.parametrize("ratio", [1.2, 1.5, 3.2])
def test_compressing_pays_if_the_link_saves_more_than_the_codec_takes(codec: float, ratio: float) -> None:
    limit = codec * (1 - 1 / ratio)  # 1/link > 1/(ratio * link) + 1/codec
    for link, expected in ((limit * 0.9, True), (limit * 1.1, False)):
        assert measured(CompressionChoice(), link, codec, ratio)[-1] is expected


def test_nothing_is_compressed_before_everything_is_measured() -> None:
    choice = CompressionChoice()
    assert not choice.pays()
    choice.sent(MIB, 10.0, MIB)
    assert not choice.pays()
    choice.encoded(MIB, MIB // 2, 0.001)
    assert not choice.pays()
    choice.decoded(MIB, 0.001)
    assert choice.pays()


def test_the_decision_follows_a_link_that_changes() -> None:
    choice = CompressionChoice()
    assert measured(choice, link=0.1e9, codec=1e9, ratio=1.5)[-1]
    assert not measured(choice, link=10e9, codec=1e9, ratio=1.5)[-1]
    assert measured(choice, link=0.1e9, codec=1e9, ratio=1.5)[-1]


@pytest.mark.parametrize("first", [0.1e9, 10e9])
def test_at_the_limit_the_decision_stays(first: float) -> None:
    choice = CompressionChoice()
    before = measured(choice, first, 1e9, 2.0)[-1]
    limit = 1e9 * (1 - 1 / 2.0)
    assert set(measured(choice, limit, 1e9, 2.0, rounds=400, spread=0.3)[40:]) == {before}


def test_a_codec_that_makes_nothing_smaller_never_pays() -> None:
    assert True not in measured(CompressionChoice(), link=1e6, codec=1e12, ratio=1.0)


def test_bytes_that_are_loaded_often_count_more() -> None:
    # Encoding costs more than the link saves, decoding less: it pays as soon as enough is loaded.
    choice = CompressionChoice()
    choice.sent(MIB, 1.0, MIB)
    choice.encoded(MIB, MIB // 2, 2.0)
    choice.decoded(MIB, 0.1)
    assert not choice.pays()
    for _ in range(2):
        choice.received(MIB, 1.0, MIB)
        assert not choice.pays()
    for _ in range(3):
        choice.received(MIB, 1.0, MIB)
    assert choice.pays()


def test_a_codec_that_is_not_in_use_is_measured_within_a_hundredth_of_the_time() -> None:
    choice = CompressionChoice()
    spent = measurements = 0
    for _ in range(2000):
        if choice.due():
            choice.encoded(MIB, MIB - 1, 0.01)
            choice.decoded(MIB, 0.01)
            spent += 0.02
            measurements += 1
        choice.sent(MIB, 0.01, MIB)
        assert not choice.pays()
    assert spent <= 0.01 * 2000 * 0.01 + 0.02
    assert measurements > 5


def test_a_codec_that_is_in_use_needs_no_samples() -> None:
    choice = CompressionChoice()
    assert choice.due()
    assert measured(choice, 0.1e9, 1e9, 2.0)[-1]
    assert not choice.due()


def test_measurements_of_no_bytes_count_for_nothing() -> None:
    choice = CompressionChoice()
    choice.sent(0, 1.0, 0)
    choice.received(0, 1.0, 0)
    choice.encoded(0, 0, 1.0)
    choice.decoded(0, 1.0)
    assert not choice.pays()
