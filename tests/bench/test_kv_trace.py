"""``farpool bench kv``: counts on a trace small enough to work out by hand, the files that it reads, and real bytes."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farpool.errors import ConfigError
from farpool_bench import kv_request_lines, kv_requests
from farpool_bench.command import app
from farpool_bench.harness import Row, rows_of

# Two conversations over one system prompt (block 0); the first has a second turn after the other one's.
CHAINS = [[0, 1, 2], [0, 10, 11], [0, 1, 2, 3], [0, 10, 11, 12]]
LENGTHS = [1200, 1300, 2048, 1600]
POLICIES = ("--policy", "node", "--policy", "pool", "--policy", "lru")


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


def run(path: Path, *arguments: str) -> Row:
    done = CliRunner().invoke(app, ["kv", "--trace", str(path), "--json", *arguments])
    assert done.exit_code == 0, done.output
    return rows_of(json.loads(done.stdout)["result"])


def test_hits_tokens_bytes_and_times_are_those_worked_out_by_hand(trace: Path) -> None:
    cost = ("--bytes-per-token", "4", "--prefill-tokens-per-second", "1000", "--link", "4000000")
    block = 512 * 4
    outcome = run(trace, *cost, "--size", str(8 * block), "--size", str(3 * block), "--nodes", "1", *POLICIES)
    assert (outcome.requests, outcome.tokens, outcome.blocks, outcome.distinct) == (4, sum(LENGTHS), 14, 7)
    assert (outcome.block_tokens, outcome.infinite_hits) == (512, 7)
    assert outcome.recompute_ttft_mean == sum(LENGTHS) / 4 / 1000
    runs = {(one.policy, one.size): one for one in outcome.runs}
    assert set(runs) == {(policy, size * block) for policy in ("node", "pool", "lru") for size in (8, 3)}
    for policy in ("node", "pool", "lru"):
        large, small = runs[policy, 8 * block], runs[policy, 3 * block]
        assert (large.hits, large.hit_tokens) == (7, 7 * 512)
        assert large.saved_seconds == pytest.approx(7 * 0.512)
        assert (large.loaded_bytes, large.stored_bytes) == (7 * block, 7 * block)
        # A token takes 1 ms to compute and 1 us to load.
        assert large.ttft_mean == pytest.approx((sum(LENGTHS) - 7 * 512 * 0.999) / 4 / 1000)
        # Three blocks hold the system prompt and one conversation, so nothing but the system prompt is found.
        # A node does not know that the others are of no use without it, and gives it up once.
        assert small.hits == (2 if policy == "node" else 3)
        assert large.used == {"node" if policy == "node" else "lru": 1}
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
    for policy in ("node", "pool"):
        spread = {one.nodes: one for one in outcome.runs if one.policy == policy}
        assert {nodes: one.hits for nodes, one in spread.items()} == {1: 7, 3: 7}
        assert sum(spread[3].used.values()) == 3


def test_a_dry_run_replays_the_policy_of_nodes_unless_it_is_told_another(trace: Path, tmp_path: Path) -> None:
    prompt = list(range(40))
    log = write(tmp_path / "prompts.jsonl", [prompt, {"prompt_token_ids": [*prompt, 7, 8]}, {"tokens": [1, *prompt]}])
    done = CliRunner().invoke(app, ["kv", "--dry-run", str(log), "--size", "1GiB", "--json"])
    assert done.exit_code == 0, done.output
    outcome = rows_of(json.loads(done.stdout)["result"])
    assert [(one.policy, one.nodes, one.hits) for one in outcome.runs] == [("node", 1, 2)]
    assert (outcome.blocks, outcome.distinct, outcome.tokens, outcome.plain) == (6, 4, 123, ())
    done = CliRunner().invoke(app, ["kv", "--dry-run", str(log), "--policy", "pool", "--json"])
    outcome = rows_of(json.loads(done.stdout)["result"])
    assert {one.policy for one in outcome.runs} == {"pool"}
    both = CliRunner().invoke(app, ["kv", "--dry-run", str(log), "--trace", str(trace)])
    assert isinstance(both.exception, ConfigError)


def test_the_table_and_the_picture_show_every_policy(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "hits.svg"
    done = CliRunner().invoke(app, ["kv", "--trace", str(trace), "--nodes", "1", "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    for name in ("node", "pool", "lru", "expected-reuse", "sieve, plain", "arc, plain", "belady, a bound"):
        assert name in done.stdout
    assert picture.read_text().lstrip().startswith("<?xml")
    wrong = CliRunner().invoke(app, ["kv", "--picture", str(tmp_path / "hits.doc")])
    assert "name a .png, .svg or .pdf file" in str(wrong.exception)


@pytest.mark.slow
def test_real_nodes_of_each_size_have_about_the_hits_of_simulated_ones_and_a_pool_has_them() -> None:
    done = CliRunner().invoke(
        app,
        [
            "kv",
            "--quick",
            "--json",
            "--nodes",
            "1",
            "--nodes",
            "2",
            "--real",
            "300",
            "--policy",
            "node",
            "--policy",
            "pool",
        ],
    )
    assert done.exit_code == 0, done.output
    outcome = rows_of(json.loads(done.stdout)["result"])
    assert {(one.policy, one.nodes) for one in outcome.real} == {("node", 1), ("node", 2), ("pool", 1)}
    assert len({one.size for one in outcome.real}) == 5
    simulated = {(one.policy, one.nodes, one.size): one.hits for one in outcome.runs}
    for one in outcome.real:
        assert (one.requests, one.block_bytes) == (300, 1024)
        assert one.simulated_hits == simulated[one.policy, one.nodes, one.size]
        assert one.loaded_bytes == one.hits * 1024
        if one.policy == "pool":
            assert abs(one.hits - one.simulated_hits) < 0.02 * one.simulated_hits
    [largest] = [one for one in outcome.real if (one.policy, one.nodes) == ("node", 1)][-1:]
    assert 0.8 * largest.simulated_hits < largest.hits < 1.2 * largest.simulated_hits


def test_real_bytes_of_a_part_of_the_requests_have_the_hits_of_that_part(trace: Path) -> None:
    outcome = run(trace, "--size", "1GiB", "--nodes", "1", "--policy", "node", "--real", "3", "--scale", "3KiB")
    [real] = outcome.real
    assert (real.requests, real.hits, real.simulated_hits) == (3, 4, 4)
    assert (real.loaded_bytes, real.stored_bytes) == (4 * 3072, 6 * 3072)


@pytest.mark.slow
def test_nodes_keep_more_of_prefixes_than_policies_on_blocks_where_memory_is_short() -> None:
    done = CliRunner().invoke(app, ["kv", "--json", "--nodes", "1", "--policy", "node", "--policy", "lru"])
    outcome = rows_of(json.loads(done.stdout)["result"])
    for size in {one.size for one in outcome.runs}:
        hits = {one.policy: one.hits for one in outcome.runs if one.size == size}
        plain = {one.policy: one.hits for one in outcome.plain if one.size == size}
        assert hits["node"] > max(0.95 * hits["lru"], plain["sieve"])


def test_timed_traces_with_small_blocks_are_read(tmp_path: Path) -> None:
    lines = [{"timestamp": 0.5, "input_length": 33, "output_length": 1, "hash_ids": [5, 6, 7]}, {"hash_ids": [5, 8]}]
    found = kv_requests.read(write(tmp_path / "timed.jsonl", lines))
    assert (found.block_tokens, found.chains, found.tokens) == (16, [[0, 1, 2], [0, 3]], [33, 32])


def test_a_name_behind_another_block_is_another_block(tmp_path: Path) -> None:
    lines = [{"hash_ids": [5, 6, 6]}, {"hash_ids": [7, 6]}, {"hash_ids": [5, 6]}, {"hash_ids": [7, 6, 6]}]
    path = write(tmp_path / "by-tokens.jsonl", lines)
    found = kv_requests.read(path, 16)
    assert (found.chains, found.folded) == ([[0, 1, 2], [3, 4], [0, 1], [3, 4, 5]], 1)
    outcome = run(path, "--block-tokens", "16")
    assert (outcome.distinct, outcome.infinite_hits, outcome.folded) == (6, 4, 1)
    shown = CliRunner().invoke(app, ["kv", "--trace", str(path), "--block-tokens", "16"]).stdout
    assert "1 names of blocks stand behind different blocks" in shown


def test_fields_may_have_other_names(tmp_path: Path) -> None:
    path = write(tmp_path / "named.jsonl", [{"chunks": [1, 2, 3], "prompt": 33}, {"chunks": [1, 2], "prompt": 30}])
    outcome = run(path, "--label-hash-ids", "chunks", "--label-input-length", "prompt")
    assert (outcome.block_tokens, outcome.tokens, outcome.infinite_hits) == (16, 63, 2)
    wrong = CliRunner().invoke(app, ["kv", "--trace", str(path), "--label-hash-ids", "blocks"])
    assert "neither blocks nor token ids" in str(wrong.exception)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_logs_of_engines_are_read_where_they_have_token_ids(engine: str) -> None:
    found = kv_requests.read(Path(__file__).parent / f"logs/{engine}.log")
    # Two prompts of 40 and 42 tokens that begin alike; a third request came as text.
    assert (found.chains, found.tokens, found.block_tokens) == ([[0, 1], [0, 1]], [40, 42], 16)


def test_a_log_without_token_ids_or_with_a_part_of_them_is_refused(tmp_path: Path) -> None:
    log = Path(__file__).parent / "logs/sglang.log"
    cut = tmp_path / "cut.log"
    cut.write_text(log.read_text().replace("[100, 101", '[100, "...", 101'))
    with pytest.raises(ConfigError, match=r"line 1 .* lacks some token ids; start SGLang with --log-requests-level 3"):
        kv_requests.read(cut)
    text = tmp_path / "text.log"
    text.write_text(log.read_text().splitlines()[2])
    with pytest.raises(ConfigError, match="no line of vLLM's or SGLang's log with the token ids"):
        kv_requests.read(text)


VLLM = """
import json, sys
from unittest.mock import MagicMock
sys.modules["einops"] = MagicMock()  # which the engine's models need, and the reader of traces does not
from vllm.benchmarks.datasets.datasets import TimedTrace
labels = {"timestamp": "when", "input_length": "prompt", "output_length": "answer", "hash_ids": "chunks"}
given = {f"timed_trace_label_{name}": label for name, label in labels.items()}
trace = TimedTrace(dataset_path=sys.argv[1], timed_trace_chunk_hash_size=16, random_seed=1, **given)
vocabulary = {str(number): number for number in range(50_000)}
tokenizer = MagicMock(all_special_ids=[0], get_vocab=lambda: vocabulary)
print(json.dumps([one.prompt for one in trace.sample(tokenizer, 1000)]))
"""


@pytest.mark.slow
def test_timed_traces_have_the_blocks_of_the_prompts_that_vllm_makes_of_them(tmp_path: Path) -> None:
    pythons = sorted((Path(__file__).parents[2] / "build/kv-envs").glob("vllm-[0-9]*/bin/python"))
    if not pythons:
        pytest.skip("vLLM is not installed (scripts/kv-envs vllm)")
    dice = random.Random(3)
    lines = []
    for number in range(60):
        chunks = [dice.randrange(3) for _ in range(dice.randrange(1, 8))]  # by their own tokens, whatever is before
        length = 16 * len(chunks) - dice.choice((0, 0, 5))
        lines.append({"when": number, "prompt": length, "answer": 1, "chunks": chunks})
    path = write(tmp_path / "timed.jsonl", lines)
    done = subprocess.run(
        [str(pythons[-1]), "-c", VLLM, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    prompts = json.loads(done.stdout.splitlines()[-1])
    found = kv_requests.read(path, 16, "chunks", "prompt")
    assert found.tokens == [len(prompt) for prompt in prompts]
    assert found.folded > 0
    for one, tokens in zip(found.chains, prompts, strict=True):
        for other, others in zip(found.chains, prompts, strict=True):
            full = min(len(tokens), len(others)) // 16
            same = next(
                (at for at in range(full) if tokens[16 * at : 16 * at + 16] != others[16 * at : 16 * at + 16]), full
            )
            assert [a == b for a, b in zip(one[:full], other[:full], strict=True)] == [at < same for at in range(full)]


def test_prompts_are_cut_into_full_blocks_named_by_all_tokens_before(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [[1, 2, 3, 4, 5], [1, 2, 3, 4], [9, 2, 3, 4]])
    found = kv_requests.read(path, 2)
    assert (found.chains, found.tokens) == ([[0, 1], [0, 1], [2, 3]], [5, 4, 4])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"text": "hello"}], "line 1 .* neither hash_ids nor token ids"),
        ([{"hash_ids": ["a"]}], "pass --block-tokens"),
        (
            [{"hash_ids": [1]}, {"hash_ids": [1, [2]]}],
            r"line 2 .*: hash_ids: entry 1 is \[2\], expected names .* texts",
        ),
        ([{"hash_ids": [1, True]}], "entry 1 is True, expected names of blocks"),
        ([{"hash_ids": [1.0]}], r"entry 0 is 1\.0, expected names of blocks"),
        ([{"hash_ids": [1, "1"]}], "entry 1 is '1', expected names of blocks that are all whole numbers or all texts"),
        ([{"hash_ids": "abc"}], "hash_ids is 'abc', expected a list"),
        ([{"hash_ids": [1]}, {"hash_ids": ["1"]}], "line 2 .* are texts, and lines before it hold .* whole numbers"),
        ([{"hash_ids": [1]}, [1, 2, 3]], "line 2 .* holds a prompt, and lines before it hold names"),
        ([{"hash_ids": [1], "input_length": True}], "input_length is True, expected a whole number"),
        ([{"hash_ids": [1], "input_length": -1}], "input_length is -1, expected a whole number"),
        ([{"hash_ids": [1], "input_length": "9"}], "input_length is '9', expected a whole number"),
        ([{"tokens": 512}], "tokens is 512, expected a list of token ids"),
        (
            [{"ContextTokens": 7, "GeneratedTokens": 1}],
            "fields are 'ContextTokens', 'GeneratedTokens'. Nothing in it says",
        ),
        ([[1, 2], [3, True]], "line 2 .* no token ids: entry 1 is True"),
        ([[1, 1 << 64]], "line 1 .* no token ids: entry 1 is 18446744073709551616"),
        ([[1, -1]], "entry 1 is -1"),
        ([[{"hash_ids": [1]}]], r"line 1 .* a list of requests, expected one request a line: .* jq -c '\.\[\]'"),
        ([17], "line 1 .* is 17, expected an object with 'hash_ids'"),
        ([["hello"]], "line 1 .* no token ids"),
        ([{"hash_ids": [1]}], "pass --block-tokens"),
        ([], "no requests"),
        ([[1, 2]], "no requests with a full block"),
    ],
)
def test_a_file_that_is_no_log_is_named_with_its_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_requests.read(write(tmp_path / "log.jsonl", lines))


def test_names_of_blocks_may_be_texts_or_numbers_of_any_size(tmp_path: Path) -> None:
    digest = "7f" * 32
    texts = [{"hash_ids": [digest, "a"]}, {"hash_ids": [digest, "b"]}, {"hash_ids": ["", "a"]}, {"hash_ids": []}]
    found = kv_requests.read(write(tmp_path / "texts.jsonl", texts), 16)
    assert (found.chains, found.folded) == ([[0, 1], [0, 2], [3, 4], []], 1)
    wide = [{"hash_ids": [1 << 64, -1]}, {"hash_ids": [1 << 64, (1 << 64) - 1]}, {"hash_ids": [(1 << 64) + 1]}]
    found = kv_requests.read(write(tmp_path / "wide.jsonl", wide), 16)
    assert found.chains == [[0, 1], [0, 2], [3]]


def packed(form: str, data: bytes) -> bytes:
    if form == "gzip":
        return gzip.compress(data)
    return bytes(pytest.importorskip("zstandard").compress(data))


@pytest.mark.parametrize("form", ["gzip", "zstd"])
def test_a_compressed_file_has_the_requests_of_the_plain_one(trace: Path, form: str) -> None:
    plain = trace.read_bytes()
    twice = trace.parent / "no-suffix"
    # Two parts that follow each other, cut in the middle of a line, with the zeros that tapes add.
    twice.write_bytes(packed(form, plain[:200]) + packed(form, plain[200:]) + bytes(5000))
    assert replace(kv_requests.read(twice), name=trace.name) == kv_requests.read(trace)


@pytest.mark.parametrize("form", ["gzip", "zstd"])
def test_a_compressed_file_that_is_cut_off_or_damaged_or_empty_is_named(tmp_path: Path, form: str) -> None:
    dice = random.Random(7)
    lines = [{"hash_ids": [dice.randrange(1 << 60) for _ in range(100)]} for _ in range(50)]
    whole = packed(form, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    path = tmp_path / "log.jsonl.packed"
    path.write_bytes(whole[:-2000])
    with pytest.raises(ConfigError, match="its end is missing"):
        kv_requests.read(path, 16)
    path.write_bytes(whole[:4000] + bytes(4000) + whole[8000:])
    with pytest.raises(ConfigError, match=r"damaged|line .* is not JSON"):
        kv_requests.read(path, 16)
    path.write_bytes(packed(form, b""))
    with pytest.raises(ConfigError, match="is empty: it holds no requests"):
        kv_requests.read(path, 16)
    path.write_bytes(packed(form, b'{"hash_ids": [1]}\n\n{"hash_ids": [1}\n'))
    with pytest.raises(ConfigError, match=r"line 3 of .* is not JSON"):
        kv_requests.read(path, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:01:51.16,374,44\n", "TIMESTAMP, ContextTokens, Gen"),
        ("Timestamp,Model,Request tokens,Log Type\r\n5,ChatGPT,472,API log\r\n", "Model, Request tokens, Log Type"),
        ("\ufeffid;length\n1;2\n", "the columns id, length"),
    ],
)
def test_a_table_of_token_counts_is_said_to_name_no_prefixes(tmp_path: Path, text: str, message: str) -> None:
    for name, data in (("trace.csv", text.encode()), ("trace.csv.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=r"table \(CSV\) .*does not tell which of them begin alike") as raised:
            kv_requests.read(tmp_path / name)
        assert message in str(raised.value)
        assert "needed are JSON lines, each an object with 'hash_ids'" in str(raised.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"time,hash_ids\n1,7 8\n", "tables are not read"),
        (b"[\n{},\n{}]\n", "one JSON document over several lines"),
        (b"PAR1\0\0\x01", "holds binary data"),
        (b"\xff\xfe\xff", "line 1 of .* is not JSON"),
        (b"[" * 100_000, "line 1 of .* is not JSON"),
        (b'["\xff"]\n', "line 1 of .* is not JSON"),
        (b"[1]\n[1e999]\n", "line 2 of .* is not JSON: Number out of range"),
        (b'[2026-01-01 00:00:00] {"event": }\n', "line 1 of .* looks like an entry of an engine's log and is not JSON"),
        (
            b"Request 1 details: prompt: 'a', prompt_token_ids: [1,,2], prompt_embeds shape: None.",
            "line 1 of .* looks like an entry of an engine's log and is not JSON",
        ),
        (
            b'[2026-01-01 00:00:00] {"event": "request.received", "obj": {"input_ids": [[1], 2]}}',
            "line 1 of .*: a prompt is 2, expected a list of token ids",
        ),
    ],
)
def test_a_file_of_another_form_is_refused_with_what_it_is(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        kv_requests.read(tmp_path / "log")


@pytest.mark.slow
def test_reading_holds_one_line_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.jsonl.gz"
    path.write_bytes(gzip.compress(b"[7]\n" * 10 + b" " * 5_000_000))
    monkeypatch.setattr(kv_request_lines, "_LINE_BYTES_MAX", 4_000_000)
    with pytest.raises(ConfigError, match="a line of more than 4,000,000 bytes"):
        kv_requests.read(path)
    path.write_bytes(gzip.compress((b"[7]" + b" " * 99 + b"\n") * 200_000))
    tracemalloc.start()
    for number, request in enumerate(kv_request_lines.read_lines(path, "", ""), 1):
        assert (request.line, request.prompt) == (number, [7])
        if number == 60_000:
            break
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20  # the file has 20 MB; 4 KiB of it can be 4 MiB of lines


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
