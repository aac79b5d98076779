"""The native path to a device: what it costs the program's thread, and how near transfers come to the link.

No GPU takes part. A simulated CUDA driver stands in for NVIDIA's: it has host memory as the device's, streams and
events, and checks each call. `make test-native` builds it in a clone of farpool.

Thread: processor time of a program's thread for an access whose bytes are in place, on the host and on the simulated
device, and for a transfer, in a process without Python. The driver's calls alone are measured next to them: their cost
is the simulation's; a real driver has other costs.

Streaming: a program reads storages of four times the budget in a loop and computes nothing, over a link of a known
rate: on the simulated device in real time, and on the host with a tier throttled to the same rate, in turn.

Interpreter: a thread reads several of these blocks at once on the device, and another one takes the interpreter lock
when these transfers have begun, and sleeps with it. Transfers that end meanwhile needed no thread with this lock. The
tier is page-locked, or its bytes go through staging memory, which our threads copy.

Steps: the pager on simulated hardware in virtual time, where the thread's costs are those measured above: a forward
pass again and again, and training steps whose optimizer updates a layer in the backward pass. The limit is the longer
of two times: computing, and moving the fewest bytes (Belady's rule) over the link, which moves bytes both ways at once.
By phases, each pass has its own limit, with the bytes that this rule moves in it, and their sum counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar

from farpool.errors import ConfigError
from farpool_bench import harness
from farpool_bench.harness import Option, Row
from farpool_bench.render import Grid


class Bench(harness.Benchmark):
    """The thread's costs, streaming in real time, the interpreter lock, and steps in virtual time."""

    name = "device"
    limit = "the same on the host, and the link"
    parts = ("thread", "streaming", "interpreter", "steps")
    measured_in = "device_cases"
    rounds: Annotated[int, Option("Samples of each", least=1)] = 9
    build: Annotated[Path, Option("Folder in which make test-native has built the simulated driver", "FOLDER")] = Path(
        "build/native-tests"
    )
    accesses: int = 50_000  # of a sample, with everything in place
    transfers: int = 2_000  # accesses of a sample that need transfers
    rate: float = 2e9  # bytes per second of the link in real time
    fast: int = 64 << 20  # bytes of the pools that stream
    layers: int = 32  # in virtual time
    layer_seconds: float = 0.001
    link: float = 55e9  # bytes per second each way, in virtual time
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)  # time to compute over time on the link
    QUICK: ClassVar = {"rounds": 1, "accesses": 500, "transfers": 50, "fast": 4 << 20, "layers": 8}

    def open(self) -> None:
        for path in (self.driver, self.program):
            if not path.exists():
                raise ConfigError(
                    f"build {self.build} has no {path.relative_to(self.build)}; run `make test-native` in a clone of "
                    "farpool, and pass its folder build/native-tests with --build"
                )

    @property
    def driver(self) -> Path:
        """The simulated driver."""
        return self.build / "fake_cuda" / "libcuda.so.1"

    @property
    def program(self) -> Path:
        """The program that measures the thread's costs."""
        return self.build / "device_speed"

    def facts(self) -> dict[str, Any]:
        return {"rate": self.rate, "link": self.link, "layer_seconds": self.layer_seconds, "layers": self.layers}

    def outcome(self, found: list[Any]) -> Row:
        thread, streaming, interpreter, steps = found
        return Row(self.facts(), thread=thread, streaming=streaming, interpreter=interpreter, steps=steps)

    def measure(self, case: str) -> Any:
        if case == "thread":
            self._thread = super().measure(case)
            return self._thread
        return super().measure(case)

    @property
    def costs(self) -> tuple[float, float]:
        """Measured seconds of the thread for an access and for a transfer."""
        return self._thread.access_seconds, self._thread.transfer_seconds

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        columns = "on the host {host_access:1e6*.2f}|on the device {device_access:1e6*.2f}"
        columns += "|the driver's calls alone {driver_calls:1e6*.2f}|calls {calls_per_access:.1f}"
        yield Grid.of("An access, everything resident: µs of the thread", columns, [outcome.thread])
        columns = "on the host {host_transfer:1e6*.1f}|on the device {transfer:1e6*.1f}"
        columns += "|there while the program waits {waited_transfer:1e6*.1f}|waking a thread alone {wake:1e6*.1f}"
        yield Grid.of("A transfer: µs of the thread", columns, [outcome.thread])
        columns = "link {rate:rate}|host, GB/s {host:1e-9*.2f}|device, GB/s {device:1e-9*.2f}"
        columns += "|device / host {ratio:.3f}|same bytes {equal:yes}"
        yield Grid.of("Streaming", columns, [Row(outcome.streaming, rate=outcome.rate)])
        columns = "<memory of the tier {way}|transfers {transfers}|ended before {before}|meanwhile {meanwhile}"
        columns += "|after {after}|seconds {seconds:.2f}"
        yield Grid.of("While a thread keeps the interpreter lock", columns, outcome.interpreter)
        columns = "=program {program}|compute / link {ratio:.1f}|limit {limit:ms}|of the limit {efficiency:.2f}"
        columns += "|by phases {efficiency_by_phases:.2f}"
        columns += "|a step {seconds:ms}|bytes moved / fewest {excess:.2f}"
        yield Grid.of("Steps in virtual time", columns, outcome.steps)
