"""Programs with streams of their own."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import farpool
from farpool.memory.pool import blocks_of
from tests.gpu.programs import batch, build, weight_bytes, within

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


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


def test_a_graph_of_plain_operations_is_captured_while_copies_of_a_pool_are_under_way() -> None:
    inputs = torch.arange(1024, device="cuda", dtype=torch.float32)
    outputs = torch.empty_like(inputs)
    weights = [torch.randn(1024, 1024, generator=torch.Generator().manual_seed(i)).to("cuda") for i in range(6)]
    side, capturing = torch.cuda.Stream(), torch.cuda.Stream()
    graph, results = torch.cuda.CUDAGraph(), []
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
        queue = blocks_of(pool)._queue
        thread.start()
        within(lambda: queue.pending > 0)
        with torch.cuda.stream(capturing):
            # Not torch.cuda.graph: that would wait for the sleep, and for the copies with it.
            graph.capture_begin(capture_error_mode="global")
            torch.mul(inputs, 3, out=outputs)
            time.sleep(0.2)  # meanwhile the queue finds out whether its copies have ended
            assert queue.pending > 0
            graph.capture_end()
        thread.join(60)
        assert not thread.is_alive()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(outputs, inputs * 3)
        assert all(torch.equal(ours, weight) for ours, weight in zip(results[0], weights, strict=False))
