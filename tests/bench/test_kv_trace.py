"""``farpool bench kv``: counts on a trace small enough to work out by hand, the files that it reads, and real bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from farpool.bench import kv, kv_requests
from farpool.cli.bench import app
from farpool.errors import ConfigError

# Two conversations over one system prompt (block 0); the first has a second turn after the other one's.
CHAINS = [[0, 1, 2], [0, 10, 11], [0, 1, 2, 3], [0, 10, 11, 12]]
LENGTHS = [1200, 1300, 2048, 1600]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": number, "input_length": length, "output_length": 7, "hash_ids": chain}
        for number, (chain, length) in enumerate(zip(CHAINS, LENGTHS, strict=True))
    ]
    return write(tmp_path / "small.jsonl", lines)


def run(path: Path, *arguments: str) -> kv.Outcome:
    done = CliRunner().invoke(app, ["kv", "--trace", str(path), "--json", *arguments])
    assert done.exit_code == 0, done.output
    return msgspec.convert(json.loads(done.stdout)["result"], kv.Outcome)


def test_hits_tokens_bytes_and_times_are_those_worked_out_by_hand(trace: Path) -> None:
    cost = ("--bytes-per-token", "4", "--prefill-tokens-per-second", "1000", "--link", "4000000")
    block = 512 * 4
    outcome = run(trace, *cost, "--size", str(8 * block), "--size", str(3 * block), "--nodes", "1", "--policy", "lru")
    assert (outcome.requests, outcome.tokens, outcome.blocks, outcome.distinct) == (4, sum(LENGTHS), 14, 7)
    assert (outcome.block_tokens, outcome.infinite_hits) == (512, 7)
    assert outcome.recompute_ttft_mean == sum(LENGTHS) / 4 / 1000
    runs = {(one.policy, one.size): one for one in outcome.runs}
    assert set(runs) == {(policy, size * block) for policy in ("chosen", "lru") for size in (8, 3)}
    for policy in ("chosen", "lru"):
        large, small = runs[policy, 8 * block], runs[policy, 3 * block]
        assert (large.hits, large.hit_tokens) == (7, 7 * 512)
        assert large.saved_seconds == pytest.approx(7 * 0.512)
        assert (large.loaded_bytes, large.stored_bytes) == (7 * block, 7 * block)
        # A token takes 1 ms to compute and 1 us to load.
        assert large.ttft_mean == pytest.approx((sum(LENGTHS) - 7 * 512 * 0.999) / 4 / 1000)
        # Three blocks hold the system prompt and one conversation, so nothing but the system prompt is found.
        assert small.hits == 3
        assert large.used == {"lru": 1}
    plain = {(one.policy, one.size // block): one.hits for one in outcome.plain}
    assert plain["belady", 8] == plain["lru", 8] == 7
    assert 3 <= plain["belady", 3] < 7


def test_a_link_that_is_slower_than_prefill_is_not_waited_for(trace: Path) -> None:
    slow = ("--bytes-per-token", "4", "--prefill-tokens-per-second", "1000", "--link", "1000", "--nodes", "1")
    outcome = run(trace, *slow, "--size", "1MiB", "--policy", "lru")
    assert all(one.ttft_mean == pytest.approx(outcome.recompute_ttft_mean) for one in outcome.runs)


def test_a_model_adds_attention_and_its_own_bytes(trace: Path) -> None:
    outcome = run(trace, "--model", "llama-3.1-8b", "--nodes", "1", "--policy", "lru")
    assert outcome.bytes_per_token == 131072
    assert outcome.attention_tokens == pytest.approx(30632, abs=1)
    assert outcome.recompute_ttft_mean > sum(LENGTHS) / 4 / 8000
    [small, *_] = outcome.runs
    assert small.saved_seconds > small.hit_tokens / 8000


def test_nodes_share_the_blocks_and_lose_no_hits_while_there_is_room(trace: Path) -> None:
    outcome = run(trace, "--bytes-per-token", "4", "--size", "1MiB", "--nodes", "1", "--nodes", "3")
    chosen = {one.nodes: one for one in outcome.runs if one.policy == "chosen"}
    assert {nodes: one.hits for nodes, one in chosen.items()} == {1: 7, 3: 7}
    assert sum(chosen[3].used.values()) == 3


def test_a_dry_run_replays_only_what_would_be_deployed(trace: Path, tmp_path: Path) -> None:
    prompt = list(range(40))
    log = write(tmp_path / "prompts.jsonl", [prompt, {"prompt_token_ids": [*prompt, 7, 8]}, {"tokens": [1, *prompt]}])
    done = CliRunner().invoke(app, ["kv", "--dry-run", str(log), "--size", "1GiB", "--json"])
    assert done.exit_code == 0, done.output
    outcome = msgspec.convert(json.loads(done.stdout)["result"], kv.Outcome)
    assert [(one.policy, one.nodes, one.hits) for one in outcome.runs] == [("chosen", 1, 2)]
    assert (outcome.blocks, outcome.distinct, outcome.tokens, outcome.plain) == (6, 4, 123, ())
    both = CliRunner().invoke(app, ["kv", "--dry-run", str(log), "--trace", str(trace)])
    assert isinstance(both.exception, ConfigError)


def test_the_table_and_the_picture_show_every_policy(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "hits.svg"
    done = CliRunner().invoke(app, ["kv", "--trace", str(trace), "--nodes", "1", "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    for name in ("chosen", "lru", "expected-reuse", "arc, plain", "belady, a bound"):
        assert name in done.stdout
    assert picture.read_text().lstrip().startswith("<?xml")
    wrong = CliRunner().invoke(app, ["kv", "--picture", str(tmp_path / "hits.doc")])
    assert "name a .png, .svg or .pdf file" in str(wrong.exception)


def test_real_bytes_have_the_hits_of_the_metadata(trace: Path) -> None:
    outcome = run(trace, "--size", "1GiB", "--nodes", "1", "--nodes", "2", "--real", "4", "--scale", "3KiB")
    assert outcome.real is not None
    assert (outcome.real.nodes, outcome.real.requests, outcome.real.block_bytes) == (2, 4, 3072)
    assert outcome.real.hits == outcome.real.expected_hits == outcome.infinite_hits == 7
    assert (outcome.real.loaded_bytes, outcome.real.stored_bytes) == (7 * 3072, 7 * 3072)
    assert {one.hits for one in outcome.runs} == {7}


def test_timed_traces_with_small_blocks_are_read(tmp_path: Path) -> None:
    lines = [{"timestamp": 0.5, "input_length": 33, "output_length": 1, "hash_ids": [5, 6, 7]}, {"hash_ids": [5, 8]}]
    found = kv_requests.read(write(tmp_path / "timed.jsonl", lines))
    assert (found.block_tokens, found.chains, found.tokens) == (16, [[0, 1, 2], [0, 3]], [33, 32])


def test_prompts_are_cut_into_full_blocks_named_by_all_tokens_before(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [[1, 2, 3, 4, 5], [1, 2, 3, 4], [9, 2, 3, 4]])
    found = kv_requests.read(path, 2)
    assert (found.chains, found.tokens) == ([[0, 1], [0, 1], [2, 3]], [5, 4, 4])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"text": "hello"}], "line 1 .* neither hash_ids nor token ids"),
        ([{"hash_ids": ["a"]}], "neither hash_ids"),
        ([{"hash_ids": [1, 2]}, {"hash_ids": [2]}], "line 2 .* block 2 after another block"),
        ([["hello"]], "line 1 .* no token ids"),
        ([{"hash_ids": [1]}], "pass --block-tokens"),
        ([], "no requests"),
        ([[1, 2]], "no requests with a full block"),
    ],
)
def test_a_file_that_is_no_log_is_named_with_its_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_requests.read(write(tmp_path / "log.jsonl", lines))


def test_a_file_that_is_not_json_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("[1, 2\n")
    with pytest.raises(ConfigError, match=r"line 1 of .* is not JSON"):
        kv_requests.read(tmp_path / "log.jsonl")
    with pytest.raises(ConfigError, match=r"cannot be read"):
        kv_requests.read(tmp_path / "absent.jsonl")


def test_a_size_of_blocks_that_the_lengths_contradict_is_refused(trace: Path) -> None:
    with pytest.raises(ConfigError, match="too many for 1200 tokens at 1024 a block"):
        kv_requests.read(trace, 1024)


def test_generated_requests_are_the_same_for_a_seed() -> None:
    assert kv_requests.generate(50) == kv_requests.generate(50)
    assert kv_requests.generate(50, 2) != kv_requests.generate(50)
    assert all(len(set(chain)) == len(chain) for chain in kv_requests.generate(50).chains)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "belady"], "policy 'belady' is not known"),
        (["--model", "gpt"], "model 'gpt' is not known"),
        (["--prefill-tokens-per-second", "0"], "prefill tokens per second"),
        (["--link", "fast"], "link is 'fast'"),
    ],
)
def test_wrong_settings_are_named(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["kv", *arguments])
    assert message in str(done.exception)
