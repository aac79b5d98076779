"""The figures in README and docs are those of the committed result files."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["result"]


def demo() -> list[str]:
    outcome = result("demo")
    seconds = outcome["paged"]["first_seconds"] + outcome["paged"]["rest_seconds"]
    stalled = outcome["first"]["stall_seconds"] + outcome["rest"]["stall_seconds"]
    megabyte = 1e6
    return [
        f"| embeddings equal to the all-resident run, bit for bit | {'all' if outcome['equal'] else 'NOT'} "
        f"{outcome['passages']} |",
        f"| peak of the fast tier, of its budget | {outcome['peak_bytes'] / megabyte:.1f} of "
        f"{outcome['budget_bytes'] / megabyte:.1f} MB |",
        f"| throughput against all-resident, median over the batches | {outcome['relative_throughput']:.2f} |",
        f"| prefetched blocks that were used | {outcome['rest']['prefetch_accuracy']:.1%} |",
        f"| waited for bytes, of the paged run's time | {stalled / seconds:.1%} |",
    ]


def streaming() -> list[str]:
    rows = []
    for case in result("streaming")["cases"]:
        demand, accelerate = case["peers"]
        rows.append(
            f"| {case['rate'] / 1e9:g} GB/s, {case['ratio']:.2f} | {case['efficiency']:.2f} | "
            f"{demand['efficiency']:.2f} | {accelerate['efficiency']:.2f} | {accelerate['speedup']:.2f} |"
        )
    return rows


def training() -> list[str]:
    return [
        f"| {case['ratio']:.2f} | {case['efficiency']:.2f} | {case['efficiency_by_phases']:.2f} | "
        f"{case['in_backward']['efficiency']:.2f} |"
        for case in result("training")["cases"]
    ]


def gpu() -> list[str]:
    rows = []
    for case in result("gpu-streaming")["cases"]:
        demand, accelerate = case["peers"]
        rows.append(
            f"| forward pass, {case['rate'] / 1e9:.0f} GB/s, {case['ratio']:.2f} | {case['efficiency']:.2f} | "
            f"{demand['efficiency']:.2f} | {accelerate['efficiency']:.2f} | {accelerate['speedup']:.2f} |"
        )
        assert case["equal"]
        assert case["stall_seconds"] < 2e-3
    for case in result("gpu-training")["cases"]:
        rows.append(
            f"| {case['ratio']:.2f} | {case['efficiency']:.2f} | {case['efficiency_by_phases']:.2f} | "
            f"{case['in_backward']['efficiency']:.2f} |"
        )
        assert case["equal"]
    steps = [json.loads(line) for line in (RESULTS / "gpu-check.jsonl").read_text().splitlines()]
    assert steps[-1] == {
        "step": "summary",
        "status": "passed",
        "passed": steps[-1]["passed"],
        "failed": [],
        "not run": [],
    }
    return rows


def gpu_steps() -> dict[str, Any]:
    """The steps of the first run of the check on a GPU, by name; the line before them under no name."""
    lines = [json.loads(line) for line in (RESULTS / "gpu-check.jsonl").read_text().splitlines()]
    return {line.get("step", ""): line for line in lines}


def copied() -> list[str]:
    """What the page of GPUs says of the first run, by the file of that run."""
    steps = gpu_steps()
    versions, rates = steps["versions"]["result"], steps["rates"]["result"]["GB/s"]
    driver = versions["link"].rpartition("\n")[2].split(", ")[1]
    outcomes = [steps[name]["result"]["pytest"].partition(" in ")[0] for name in ("tests", "capture")]
    rows = [
        f"| tests, copies, streaming, training | {versions['gpu']} | {driver} | {steps['']['started'][:10]} | "
        f"{versions['packages']['torch']} | {outcomes[0]}; CUDA graphs: {outcomes[1]} |"
    ]
    kinds = {
        "pinned": "page-locked by torch",
        "registered": "allocated first, page-locked later, as a pool does it",
        "pageable": "pageable",
    }
    for kind, name in kinds.items():
        to_device, to_host = (rates[kind][direction][str(256 << 20)] for direction in ("to device", "to host"))
        rows.append(f"| {name} | {to_device:.1f} GB/s | {to_host:.1f} GB/s |")
    return rows


def checked_parts(folder: Path) -> dict[str, str]:
    """Rows of the parts of the check that have been run on a GPU in full, by the files in a folder."""
    rows = {}
    for path in sorted(folder.glob("gpu-check-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        head, end = lines[0], lines[-1]
        if head.get("device") == "cuda" and not head["quick"] and head["part"] != "build":
            facts = (head["card"], head["driver"], head["date"][:10], head["versions"]["torch"], end["end"])
            rows[head["part"]] = f"| {head['part']} | {' | '.join(facts)} | `{path.name}` |"
    return rows


def missing_on_page(page: str, folder: Path) -> list[str]:
    """What a page of GPUs does not say, of the parts that have been run and of those that have not."""
    sys.path.append(str(ROOT / "scripts"))
    from gpu_check import PARTS

    rows = checked_parts(folder)
    left = ", ".join(f"`{part.name}`" for part in PARTS if part.name not in rows)
    expected = [
        *rows.values(),
        f"that have not been run on a GPU yet: {left}.\n" if left else "All parts have been run",
    ]
    return [text for text in expected if text not in page]


def test_the_page_of_gpus_quotes_the_result_files() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    assert [row for row in copied() if row not in page] == []
    assert missing_on_page(page, RESULTS) == []


def test_the_page_of_gpus_has_to_change_with_a_new_file(tmp_path: Path) -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    head = {"part": "copies", "card": "A card", "driver": "1.2", "date": "2030-01-02T03:04:05+00:00", "device": "cuda"}
    head |= {"quick": False, "versions": {"torch": "9.9"}}
    lines = [head, {"figure": "pool"}, {"end": "passed", "seconds": 1.0}]
    path = tmp_path / "gpu-check-copies.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row, rest = missing_on_page(page, tmp_path)
    assert row == "| copies | A card | 1.2 | 2030-01-02 | 9.9 | passed | `gpu-check-copies.jsonl` |"
    assert "`tests`, `streaming`" in rest
    path.write_text("".join(json.dumps(line) + "\n" for line in [head | {"quick": True}, *lines[1:]]))
    assert missing_on_page(page, tmp_path) == []


def overhead() -> list[str]:
    outcome = result("overhead")
    linear = outcome["operations"][0]
    rows = [
        f"| `F.linear` 64 × 64, for each paged argument | {linear['seconds_per_argument'] * 1e6:.1f} µs, "
        f"{linear['seconds_over_bare'] * 1e6:.1f} µs over a bare subclass |"
    ]
    rows += [
        f"| a transformer layer of {layers['layer_seconds'] * 1e3:.1f} ms | {layers['ratio']:.2f} of its time, "
        f"{layers['ratio_to_bare']:.2f} of a bare subclass's |"
        for layers in outcome["layers"]
    ]
    more = outcome["training"]["seconds_per_parameter"]
    rows.append(f"| a training step of 24 × Linear(64), fused AdamW, for each parameter | {more * 1e6:.0f} µs |")
    return rows + [
        f"| {picked['picked']:,} random rows of 16 KiB a call, table ten times the budget | "
        f"{picked['bytes_per_second'] / 1e9:.1f} GB/s, "
        f"{picked['thread_seconds_per_row'] * 1e6:.1f} µs of the thread a row |"
        for picked in outcome["rows"]
    ]


def nvme() -> list[str]:
    of_fio: dict[tuple[int, int], dict[bool, float]] = {}
    for row in result("nvme")["rows"]:
        of_fio.setdefault((row["block"], row["depth"]), {})[row["write"]] = row["of_fio"]
    return [
        f"| {block >> 10} KiB × {depth} | {ratios[True]:.2f} | {ratios[False]:.2f} |"
        for (block, depth), ratios in of_fio.items()
    ]


def growth() -> list[str]:
    points = result("growth")["points"]
    first, last = points[0], points[-1]
    micro = [statistics.median(point["loop"]) * 1e6 for point in (first, last)]
    return [
        f"| pager time of an access, {first['blocks']:,} and {last['blocks']:,} blocks | "
        f"{micro[0]:.1f} and {micro[1]:.1f} µs |",
        f"| memory of a block, of {last['blocks']:,} | {last['nbytes'] / last['blocks']:.0f} bytes |",
    ]


def region() -> list[str]:
    outcome = result("region")
    faults = outcome["faults"]
    micro = [statistics.median(faults[name]) * 1e6 for name in ("ours", "bare")]
    rows = [f"| random fault, memory below | {micro[0]:.1f} µs | {micro[1]:.1f} µs, {faults['ratio']:.2f} | - |"]
    for case in outcome["cases"]:
        for sweep in case["sweeps"]:
            rates = {name: statistics.median(sweep[name]) / 1e9 for name in ("ours", "bare", "alone") if sweep[name]}
            bare = f"{rates['bare']:.2f} GB/s, {sweep['of_bare']:.2f}" if "bare" in rates else "-"
            rows.append(
                f"| {sweep['way']} sweep, {case['tier']} below | {rates['ours']:.2f} GB/s | {bare} | "
                f"{rates['alone']:.2f} GB/s, {sweep['of_alone']:.2f} |"
            )
    return rows


def device() -> list[str]:
    outcome = result("device")
    thread = outcome["thread"]
    micro = {name: statistics.median(thread[name]) * 1e6 for name in ("host_access", "device_access", "driver_calls")}
    kinds = ("host_transfer", "transfer", "waited_transfer", "wake")
    transfers = [statistics.median(thread[kind]) * 1e6 for kind in kinds]
    streamed = [statistics.median(outcome["streaming"][where]) / 1e9 for where in ("host", "device")]
    rows = [
        f"| µs of the thread for a resident access: on the host, on the device, of these the simulated driver's | "
        f"{micro['host_access']:.2f}, {micro['device_access']:.2f}, {micro['driver_calls']:.2f} |",
        f"| streaming, behind 2 GB/s each: host, device | {', '.join(f'{one:.2f}' for one in streamed)} GB/s |",
        f"| µs of the thread for a transfer: on the host, on the device, there while it waits, waking a thread alone | "
        f"{', '.join(f'{one:.1f}' for one in transfers)} |",
    ]
    for kept in outcome["interpreter"]:
        assert kept["after"] == 0
        rows.append(
            f"| transfers that ended while a thread kept the interpreter lock, after it, {kept['way']} | "
            f"{kept['meanwhile']}, {kept['after']} |"
        )
    return rows + [
        f"| {step['program']}, compute / link {step['ratio']:g} | {step['efficiency']:.2f} of the limit, "
        f"{step['efficiency_by_phases']:.2f} by phases |"
        for step in outcome["steps"]
    ]


def policies() -> list[str]:
    runs: dict[str, list[Any]] = {}
    for run in result("policies")["runs"]:
        runs.setdefault(run["policy"], []).append(run)
    rows = []
    for policy, of_policy in runs.items():
        misses = {run["size"] >> 20: run["misses"] for run in of_policy}
        slowest = min(run["requests_per_second"] for run in of_policy)
        rows.append(f"| `{policy}` | {misses[128]:,} | {misses[512]:,} | {misses[1024]:,} | {slowest / 1e6:.1f} |")
    return rows


def prefetch() -> list[str]:
    ratios = [program["ratio"] for program in result("prefetch")["programs"]]
    of_demand = f"{min(ratios):.2f} to {max(ratios):.2f} of the time"
    return [f"| prefetching against demand fetching, five kinds of programs | {of_demand} |"]


def remote() -> list[str]:
    outcome = result("remote")
    rows = []
    for race in outcome["transfers"]:
        ours = statistics.median(race["ours"])
        limit = min(statistics.median(other["seconds"]) for other in race["others"])
        ratio = min(other["ratio"] for other in race["others"])
        what = {"get_into_many": "get", "put_many": "put"}[race["what"]]
        rate, most = (race["nbytes"] / seconds / 1e9 for seconds in (ours, limit))
        rows.append(
            f"| {what} {race['nbytes'] >> 20} MiB, TCP | {rate:.1f} GB/s | C sockets {most:.1f} GB/s | {ratio:.2f} |"
        )
    for race in outcome["latency"]:
        [other] = race["others"]
        ours, theirs = (statistics.median(seconds) * 1e6 for seconds in (race["ours"], other["seconds"]))
        mode = race["what"].partition(", ")[2]
        rows.append(
            f"| get 4 KiB, TCP, {mode} | {ours:.0f} µs | C {other['name']} {theirs:.0f} µs | {other['ratio']:.2f} |"
        )
    for race in outcome["secure"]:
        ours = race["nbytes"] / statistics.median(race["ours"]) / 1e9
        limit = min(statistics.median(other["seconds"]) for other in race["others"])
        ratio = min(other["ratio"] for other in race["others"])
        what = {"get_into_many": "get", "put_many": "put"}[race["what"]]
        most = race["nbytes"] / limit / 1e9
        rows.append(f"| {what} 1 MiB, TLS | {ours:.1f} GB/s | C sockets, TLS {most:.1f} GB/s | {ratio:.2f} |")
    copies = outcome["copies"]
    fastest = min(copies["others"], key=lambda other: statistics.median(other["seconds"]))
    ours, theirs = (statistics.median(seconds) * 1e6 for seconds in (copies["ours"], fastest["seconds"]))
    ratio = min(other["ratio"] for other in copies["others"])
    rows.append(f"| put 1 MiB, two copies, TCP | {ours:.0f} µs | two C sends {theirs:.0f} µs | {ratio:.2f} |")
    for race in outcome["lookups"]:
        way = {"tcp": "TCP", "mapped": "mapped"}[race["way"]]
        fastest = min(race["others"], key=lambda other: statistics.median(other["seconds"]))
        ours, theirs = (statistics.median(seconds) * 1e6 for seconds in (race["ours"], fastest["seconds"]))
        rows.append(f"| 256 keys looked up, {way} | {ours:.0f} µs | {fastest['name']} {theirs:.0f} µs | |")
    large, _, small = outcome["mapped"]
    rate = large["nbytes"] / statistics.median(large["ours"]) / 1e9
    [memcpy] = large["others"]
    rows.append(f"| get 1 MiB, mapped, verified | {rate:.0f} GB/s | memcpy | {memcpy['ratio']:.2f} |")
    rows.append(f"| get 4 KiB, mapped, verified | {statistics.median(small['ours']) * 1e6:.1f} µs | | |")
    for race in outcome["redis"]:
        by_name = {other["name"]: other["ratio"] for other in race["others"]}
        size = f"{race['nbytes'] >> 10} KiB" if race["nbytes"] < 1 << 20 else f"{race['nbytes'] >> 20} MiB"
        over_tcp = by_name["Redis, TCP"] / by_name["farpool, TCP"]
        rows.append(f"| Redis, {race['what']} {size} | {by_name['Redis, TCP']:.1f} | {over_tcp:.1f} |")
    for race in outcome["mooncake"]:
        [other] = race["others"]
        what = race["what"].replace("_into", "").replace("_many", "")
        batch = "" if race["batch"] == 1 else f", {race['batch']} at once"
        rows.append(f"| Mooncake Store, {what} {race['nbytes'] >> 20} MiB{batch} | | {other['ratio']:.1f} |")
    index = outcome["index"]
    first, last = index["points"][0], index["points"][-1]
    among = f"{first['objects']:,} and {last['objects']:,}"
    micro = [statistics.median(point[way]) * 1e6 for way in ("mapped", "tcp") for point in (first, last)]
    return [
        *rows,
        f"| memory of an object except key and payload, of {last['objects']:,} | {index['resident_bytes']:.0f} bytes |",
        f"| get among {among} objects, mapped | {micro[0]:.1f} and {micro[1]:.1f} µs |",
        f"| get among {among} objects, TCP | {micro[2]:.1f} and {micro[3]:.1f} µs |",
    ]


def stranding() -> list[str]:
    outcome = result("cluster")["parts"]["stranding"]
    figures = {figure["what"]: figure["value"] for figure in outcome["figures"]}
    alone, pool, delivered, stranded, saved = figures.values()
    return [
        f"| used over provisioned memory without the pool, with it | {alone:.2f}, {pool:.2f} |",
        f"| memory that the pool saves | {saved:.0%} |",
        f"| used over the memory that these hosts have in the trace | {delivered:.2f} |",
        f"| most memory stranded on hosts without a free GPU, over all | {stranded:.0%} |",
        f"| hosts, pods, refused pods | {outcome['hosts']}, {outcome['pods']:,}, {outcome['refused']} |",
    ]


def shared_pool() -> list[str]:
    rows = []
    for part, row in result("cluster")["parts"].items():
        for figure in (one for one in row["figures"] if one["target"] is not None):
            value = f"{figure['value']:,.0f}" if figure["value"] >= 100 else f"{figure['value']:.3g}"
            measured = f"{value} {figure['unit']}".strip()
            rows.append(f"| `{part}` | {figure['what']} | {measured} | {figure['target']} |")
    return rows


@pytest.mark.parametrize(
    "rows",
    [
        remote,
        demo,
        streaming,
        training,
        gpu,
        overhead,
        nvme,
        growth,
        policies,
        prefetch,
        stranding,
        shared_pool,
        device,
        region,
    ],
)
def test_the_page_of_benchmarks_quotes_its_result_files(rows: Callable[[], list[str]]) -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    for row in rows():
        assert row in page, row


def test_the_readme_quotes_its_result_files() -> None:
    readme = (ROOT / "README.md").read_text()
    outcome, streamed = result("demo"), result("streaming")["cases"][1]
    accelerate = streamed["peers"][1]
    on_gpu = result("gpu-streaming")["cases"]
    speedups = [case["peers"][1]["speedup"] for case in on_gpu]
    efficiencies = [case["efficiency"] for case in on_gpu]
    transfer = next(race for race in result("remote")["transfers"] if race["what"] == "get_into_many")
    rate = transfer["nbytes"] / statistics.median(transfer["ours"]) / 1e9
    assert outcome["equal"]
    without, pooled = stranding()[0].rstrip(" |").rpartition(" | ")[2].split(", ")
    hosts = result("cluster")["parts"]["stranding"]["hosts"]
    for figure in (
        f"memory that {hosts} hosts must have, in a replay of a GPU cluster's trace, without a pool and with one | "
        f"{without}, {pooled} |",
        f"on an H100, {min(speedups):.0f} to {max(speedups):.1f} times as fast as accelerate, "
        f"{min(efficiencies):.1f} to {max(efficiencies):.1f} of the limit",
        f"| all {outcome['passages']}, at {outcome['relative_throughput']:.2f} of the all-resident throughput |",
        f"({streamed['rate'] / 1e9:g} GB/s, ratio {streamed['ratio']:.2f}) | "
        f"{streamed['efficiency']:.2f} of the limit, {accelerate['speedup']:.2f} times as fast as accelerate |",
        f"objects of {transfer['nbytes'] >> 20} MiB from another process over TCP, verified | {rate:.1f} GB/s, "
        f"{min(other['ratio'] for other in transfer['others']):.2f} of plain C sockets |",
    ):
        assert figure in readme, figure


def test_the_page_of_the_registry_quotes_its_result_file() -> None:
    page, outcome = " ".join((ROOT / "docs/registry.md").read_text().split()), result("registry")
    named = {
        "farpool": "farpool: the gateway, with the standard library",
        "httpx": f"the gateway, with httpx {outcome['clients']['httpx']}",
        "aetcd": f"gRPC, with aetcd {outcome['clients']['aetcd']}",
        "grpcio": f"gRPC, with grpcio {outcome['clients']['grpcio']} and messages of its own",
        "sqlite": "the SQLite file",
    }
    for client, what in named.items():
        figures = " | ".join(f"{outcome['milliseconds'][client][one]:.1f}" for one in ("get", "put", "txn", "watch"))
        assert f"| {what} | {figures} |" in page, client
    assert f"etcd {outcome['etcd']}" in page
    outcome = result("registry-election")
    for how in ("killed", "stopped"):
        seconds = outcome[how]["seconds"]
        assert f"| {how} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |" in page, how
        assert f"with {len(seconds)} publishes in each row and etcd {outcome['etcd']}" in page
    longer = sum(one > 3 for one in outcome["stopped"]["seconds"])
    assert f"{longer} of the {len(outcome['stopped']['seconds'])} publishes took longer than 3 seconds" in page


def test_the_page_of_compression_quotes_its_result_file() -> None:
    page, outcome = (ROOT / "docs/kv-compression.md").read_text(), result("kv-codecs")
    for row in outcome["rows"]:
        encode, decode = (statistics.median(row[way]) / 1e9 for way in ("encode", "decode"))
        off = "" if row["errors"] is None else " and ".join(f"{error:.1%}" for error in row["errors"])
        figures = (f"{row['ratio']:.2f}", f"{encode:.2f}", f"{decode:.2f}", f"{row['pays_below'] / 1e9:.2f}", off)
        assert f"| {row['dtype']} | {row['codec']} | {' | '.join(figures)} |" in page, (row["dtype"], row["codec"])
    more = [100 * row["then_zstd"] for row in outcome["rows"] if row["codec"].startswith("int")]
    assert f"would save {min(more):.1f} to {max(more):.1f} percent" in page
    assert f"{outcome['blocks']} blocks of {outcome['tokens']} tokens" in page
    assert ", ".join(f"{name} {version}" for name, version in outcome["packages"].items()) in page


def kv_blocks() -> list[str]:
    """Rows of what was measured: farpool, then each other's ratio, in the order in which the file has them."""
    outcome = result("kv-blocks")
    rows = []
    for race in (*outcome["lookups"], *outcome["blocks"]):
        ours = statistics.median(race["ours"])
        way = {"tcp": "TCP", "mapped": "mapped"}[race["way"]]
        ratios = {other["name"].partition(",")[0]: f"{other['ratio']:.2f}" for other in race["others"]}
        if race in outcome["lookups"]:
            rows.append(f"| {race['what'].removeprefix('lookup of ')} looked up, {way} | {ours * 1e6:.0f} µs")
        else:
            size = f"{race['nbytes'] >> 20} MiB" if race["nbytes"] >= 1 << 20 else f"{race['nbytes'] >> 10} KiB"
            rate = race["nbytes"] / ours / 1e9
            rows.append(f"| {race['what']} {race['batch']} × {size}, {way} | {rate:.2f} GB/s")
        limit = [other["ratio"] for other in race["others"] if other["name"].startswith(("sockets", "memcpy"))]
        named = (ratios["the store's own calls"], f"{min(limit):.2f}" if limit else "")
        rows[-1] += " | " + " | ".join((*named, ratios["Mooncake"], ratios["LMCache"], ratios["Redis"])) + " |"
    return rows


def kv_ttft() -> list[str]:
    rows = []
    for point in result("kv-ttft")["points"]:
        again = statistics.median(point["recompute"]) * 1e3
        by_name = {row["name"]: row for row in point["rows"]}
        mapped, tcp = by_name["farpool, mapped"], by_name["farpool, TCP"]
        assert mapped["equal"]
        assert tcp["equal"]
        peers = ("Mooncake, TCP", "LMCache, fs", "LMCache, L1", "Redis, TCP")
        ways = (mapped, tcp, *(by_name[peer] for peer in peers if peer in by_name))
        times = [f"{statistics.median(row['seconds']) * 1e3:.1f}" for row in ways]
        rows.append(f"| {point['tokens']:,} | {again:.1f} | {' | '.join(times)} |")
        shares = []
        for row in (mapped, by_name["bare memcpy"], tcp, by_name["bare C sockets"]):
            middle, low, high = (100 * share for share in row["share"])
            shares.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        rows.append(f"| {point['tokens']:,} | {' | '.join(shares)} |")
    return rows


def kv_generate() -> list[str]:
    rows = []
    for case in result("kv-generate")["cases"]:
        assert case["equal"]
        (demand,) = (peer for peer in case["peers"] if peer["name"] == "demand fetching")
        times = (case["resident_seconds"], case["paged_seconds"], demand["seconds"])
        figures = [f"{case['efficiency']:.3f}", f"{case['moved_bytes'] / case['fewest_bytes']:.3f}"]
        figures += [f"{statistics.median(one) * 1e3:.0f} ms" for one in times]
        rows.append(f"| {case['rate'] / 1e9:g} GB/s | {' | '.join(figures)} |")
    return rows


def test_the_page_of_benchmarks_of_kv_quotes_its_result_file() -> None:
    page = (ROOT / "docs/kv-benchmarks.md").read_text()
    for row in kv_blocks() + kv_ttft() + kv_generate():
        assert row in page, row
    small = next(
        race
        for race in result("kv-blocks")["blocks"]
        if (race["what"], race["way"], race["nbytes"]) == ("load", "mapped", 64 << 10)
    )
    (own,) = (other["ratio"] for other in small["others"] if other["name"] == "the store's own calls")
    assert f"{statistics.median(small['ours']) * (1 - own) * 1e6:.1f} µs a block over the store" in page
    last = result("kv-ttft")["points"][-1]
    mapped = statistics.median(last["rows"][0]["seconds"]) * 1e3
    again = statistics.median(last["recompute"]) * 1e3
    figure = f"behind {last['tokens']:,} tokens whose KV another process has computed (a small Llama) | "
    figure += f"after {mapped:.0f} ms, where computing takes {again:,.0f} ms; the same logits |"
    assert figure in (ROOT / "README.md").read_text()


def test_the_page_of_kv_traces_quotes_its_result_file() -> None:
    page, outcome = (ROOT / "docs/kv-traces.md").read_text(), result("kv-trace")
    block, most = outcome["block_tokens"] * outcome["bytes_per_token"], outcome["infinite_hits"]
    moved = outcome["real"]
    for size in sorted({run["size"] for run in outcome["runs"]}):
        plain = {one["policy"]: one["hits"] for one in outcome["plain"] if one["size"] == size}
        bound = min(plain["belady"], most)
        best = max(("lru", "arc", "s3-fifo", "w-tiny-lfu"), key=lambda name: plain[name])
        spread = []
        for policy in ("node", "pool"):
            runs = {run["nodes"]: run for run in outcome["runs"] if run["size"] == size and run["policy"] == policy}
            hits = runs[1]["hits"]
            # What is promised: as many hits as the best policy, and never fewer than LRU.
            assert hits >= max(0.99 * plain[best], plain["lru"])
            ttft = runs[1]["ttft_mean"] / outcome["recompute_ttft_mean"]
            row = f"| {size // block:,} | {hits:,} | {hits / most:.1%} | {plain['lru']:,} | {plain['sieve']:,} | "
            row += f"{plain[best]:,} ({best}) | {hits / plain[best]:.3f} | {bound:,} | {1 - hits / bound:.1%} | "
            row += f"{ttft:.2f} |"
            assert row in page, row
            spread.append(" | ".join(format(runs[nodes]["hits"], ",") for nodes in (1, 2, 4, 8)))
        row = f"| {size // block:,} | {' | '.join(spread)} |"
        assert row in page, row
        real = {(one["policy"], one["nodes"]): one for one in moved if one["size"] == size}
        for policy in ("node", "pool"):
            one = real[policy, 1]
            assert abs(one["hits"] / one["simulated_hits"] - 1) < 0.05
        columns = [real["node", nodes] for nodes in (1, 2, 4, 8)] + [real["pool", 1]]
        row = f"| {size // block:,} | "
        row += " | ".join(f"{one['hits']:,} / {one['simulated_hits']:,}" for one in columns) + " |"
        assert row in page, row
    for figure in (
        f"{outcome['requests']:,} requests, {outcome['blocks']:,} blocks of {outcome['block_tokens']} tokens, "
        f"{outcome['distinct']:,} different; an infinite cache hits {most:,} of them ({most / outcome['blocks']:.1%})",
        f"{moved[0]['requests']:,} requests, {moved[0]['block_bytes']:,} bytes a block, "
        f"{sum(one['loaded_bytes'] for one in moved):,} bytes loaded and verified",
    ):
        assert figure in page, figure


def test_result_files_say_where_they_come_from() -> None:
    for path in RESULTS.glob("*.json"):
        provenance = json.loads(path.read_text())["provenance"]
        assert provenance["command"].startswith(("farpool ", "scripts/"))
        assert provenance["date"]
        assert provenance["versions"]["farpool"]
        assert "/tmp/" not in provenance["command"]
