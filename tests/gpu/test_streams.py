"""Copies beside computing, and programs with streams of their own."""

from __future__ import annotations

import threading

import pytest
import torch

import farpool
from farpool.memory.pager.executor import cuda as cuda_module
from tests.gpu.programs import batch, build, weight_bytes, within

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Spans:
    """Events round each copy and each block's computing, on the device's own clock."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.ops: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @staticmethod
    def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def overlaps(self) -> int:
        """Copies during which something was computed."""
        torch.cuda.synchronize()
        zero = self.ops[0][0]
        ops = [(zero.elapsed_time(start), zero.elapsed_time(end)) for start, end in self.ops]
        copies = [(zero.elapsed_time(start), zero.elapsed_time(end)) for start, end in self.copies]
        return sum(any(a < d and c < b for a, b in ops) for c, d in copies)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    spans = Spans()
    copy = torch.Tensor.copy_

    def timed(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        start = Spans.mark(torch.cuda.current_stream())
        copy(target, source, non_blocking=non_blocking)
        spans.copies.append((start, Spans.mark(torch.cuda.current_stream())))
        return target

    def _copy(
        self: cuda_module.CudaDevice, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor, fence: list
    ) -> object:
        with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
            for event in fence:
                stream.wait_event(event)
            timed(target, source, non_blocking=True)
            return cuda_module._EventCopy(stream.record_event())

    monkeypatch.setattr(cuda_module.CudaDevice, "_copy", _copy)
    return spans


def test_blocks_are_copied_while_the_gpu_computes(spans: Spans) -> None:
    model, inputs = build(layers=16, width=1024), batch(tokens=8192, width=1024)
    with torch.no_grad(), farpool.Pool(weight_bytes(model) // 2, dram="512MiB", device="cuda") as pool:
        farpool.offload(model, pool)
        for _ in range(8):
            model(inputs)
        spans.copies.clear()
        starts: list[torch.cuda.Event] = []
        for block in model:
            block.register_forward_pre_hook(lambda *_: starts.append(Spans.mark(torch.cuda.current_stream())))
            block.register_forward_hook(
                lambda *_: spans.ops.append((starts[-1], Spans.mark(torch.cuda.current_stream())))
            )
        for _ in range(3):
            model(inputs)
        assert len(spans.copies) > 10
        assert spans.overlaps() > len(spans.copies) // 4


def test_operations_on_side_streams_are_equal() -> None:
    model, inputs = build(), batch()
    with torch.no_grad():
        expected = model(inputs)
        with farpool.Pool(weight_bytes(model) // 4, dram="128MiB", device="cuda") as pool:
            farpool.offload(model, pool)
            for turn in range(12):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    result = model(inputs)
                torch.cuda.current_stream().wait_stream(stream)
                result.record_stream(torch.cuda.current_stream())
                assert torch.equal(result, expected), f"turn {turn}"


def test_what_a_side_stream_still_reads_is_not_overwritten() -> None:
    inputs = batch(tokens=4096, width=1024)
    weights = [torch.randn(1024, 1024, generator=torch.Generator().manual_seed(i)).to("cuda") for i in range(8)]
    expected = [inputs @ weight for weight in weights]
    slow, quick = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with farpool.Pool(3 * weights[0].nbytes, dram="256MiB", device="cuda") as pool, torch.no_grad():
        paged = [pool.from_tensor(weight) for weight in weights]
        torch.cuda.synchronize()
        for _ in range(3):
            results = []
            for number, weight in enumerate(paged):
                with torch.cuda.stream(slow if number % 2 else quick):
                    if number % 2:
                        torch.cuda._sleep(20_000_000)
                    results.append(inputs @ weight)
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        del paged, weight


def test_moves_are_seen_by_streams_that_come_later() -> None:
    sizes = [300_000, 700_000, 100_000, 900_000, 500_000, 200_000, 800_000]
    plain = [torch.randint(0, 255, (n,), dtype=torch.uint8, device="cuda") for n in sizes]
    with farpool.Pool("1MiB", dram="64MiB", device="cuda") as pool, torch.no_grad():
        paged = [pool.from_tensor(t) for t in plain]
        for turn in range(60):
            with torch.cuda.stream(torch.cuda.Stream()):
                number = turn * 5 % len(sizes)
                assert torch.equal(paged[number], plain[number])
        assert pool.stats().evictions > 0
        del paged


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the refused capture has nothing in it
def test_a_cuda_graph_of_paged_operations_is_refused_and_the_pool_goes_on() -> None:
    inputs = batch()
    linear = torch.nn.Linear(512, 512).to("cuda")
    with torch.no_grad():
        expected = linear(inputs)
        with farpool.Pool("8MiB", dram="8MiB", device="cuda") as pool:
            farpool.offload(linear, pool)
            linear(inputs)
            graph = torch.cuda.CUDAGraph()
            with pytest.raises(farpool.UnsupportedError, match="CUDA graph"), torch.cuda.graph(graph):
                linear(inputs)
            assert torch.equal(linear(inputs), expected)
            farpool.restore(linear)


def test_a_graph_of_plain_operations_is_captured_while_copies_of_a_pool_are_asked_for() -> None:
    inputs = torch.arange(1024, device="cuda", dtype=torch.float32)
    outputs = torch.empty_like(inputs)
    weights = [torch.randn(1024, 1024, generator=torch.Generator().manual_seed(i)).to("cuda") for i in range(6)]
    side, capturing = torch.cuda.Stream(), torch.cuda.Stream()
    graph, asked, results = torch.cuda.CUDAGraph(), [], []
    done = cuda_module._EventCopy.done

    def counted(self: cuda_module._EventCopy) -> bool:
        asked.append(self)
        return done(self)

    with farpool.Pool(2 * weights[0].nbytes, dram="64MiB", device="cuda", prefetch=False) as pool, torch.no_grad():
        paged = [pool.from_tensor(weight) for weight in weights]
        torch.mul(inputs, 2, out=outputs)  # what is captured has been launched before
        (weights[0] + 0).sum().item()
        torch.cuda.synchronize()

        def use(tensors: list[torch.Tensor]) -> None:
            with torch.cuda.stream(side), torch.no_grad():
                torch.cuda._sleep(3_000_000_000)  # its copies wait for this, a second or two
                results.append([weight + 0 for weight in tensors])

        thread = threading.Thread(target=use, args=(paged[:2],))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_module._EventCopy, "done", counted)
            thread.start()
            within(lambda: len(asked) > 10)
            with torch.cuda.stream(capturing):
                # Not torch.cuda.graph: that would wait for the sleep, and for the copies with it.
                graph.capture_begin(capture_error_mode="global")
                before = len(asked)
                torch.mul(inputs, 3, out=outputs)
                within(lambda: len(asked) > before + 10)
                graph.capture_end()
            thread.join(60)
        assert not thread.is_alive()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(outputs, inputs * 3)
        assert all(torch.equal(ours, weight) for ours, weight in zip(results[0], weights, strict=False))
