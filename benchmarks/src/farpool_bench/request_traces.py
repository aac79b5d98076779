"""Request traces for comparing eviction policies: read from a file, or generated from a seed.

A trace is a sequence of requests for objects, each with a size in bytes. Generated ones cover the patterns that tell
policies apart: popularity that follows Zipf's law, scans through it, loops, and a working set that shifts. They need
nothing but a seed, so that counts of misses can be committed and checked anywhere.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import random
from collections.abc import Callable
from pathlib import Path

from farpool._native import RequestTrace
from farpool.errors import ConfigError
from farpool_bench.harness import check_known
from farpool_bench.kv_request_lines import GZIP_MAGIC, ZSTD_MAGIC


def read(path: Path) -> RequestTrace:
    """Read a trace file: CSV where its name ends in ``.csv``, else libCacheSim's oracleGeneral."""
    try:
        with path.open("rb") as file:
            start = file.read(len(ZSTD_MAGIC))
            # A trace may begin with a time that looks like gzip's first bytes, so the name of a gzip file counts, too.
            zipped = start.startswith(GZIP_MAGIC) and path.suffix.lower() in (".gz", ".csv")
            if zipped or start == ZSTD_MAGIC:
                tool = "gzip" if zipped else "zstd"
                raise ConfigError(f"trace {path} is compressed; run '{tool} -d {path.name}' first")
            reader = RequestTrace.csv if path.suffix.lower() == ".csv" else RequestTrace.oracle_general
            if not start:
                raise ConfigError(f"trace {path} is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                trace = reader(data)
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        form = "time,object,size lines (CSV)" if path.suffix.lower() == ".csv" else "oracleGeneral records"
        raise ConfigError(f"trace {path} does not hold {form}: {error}") from error
    if len(trace) == 0:
        raise ConfigError(f"trace {path} holds no requests")
    return trace


def generate(kind: str, requests: int, seed: int = 1) -> list[int]:
    """Generate a trace: the numbers of objects in the order in which they are requested.

    `kind`: one of `KINDS`. `requests`: length of the trace. `seed`: the same seed gives the same trace.
    """
    check_known("trace", kind, KINDS)
    return KINDS[kind](requests, random.Random(seed))


def object_sizes(ids: list[int], least: int = 1024, most: int = 8192) -> list[int]:
    """Sizes in bytes, one for each request: an object always has the same, log-uniform from `least` to `most`."""
    ratio = most / least
    return [int(least * ratio ** (((number * 0x9E3779B97F4A7C15) % 2**64) / 2**64)) for number in ids]


def _zipf(requests: int, dice: random.Random, objects: int = 5000, exponent: float = 0.9) -> list[int]:
    """Independent requests by Zipf's law: the object of rank r has a weight of r to the power of -exponent."""
    pick = _popularity(objects, exponent, dice)
    return [pick() for _ in range(requests)]


def _scan(requests: int, dice: random.Random) -> list[int]:
    """Requests by Zipf's law, interrupted every 2,000 by a scan of 600 objects that are never requested again."""
    pick = _popularity(3000, 0.9, dice)
    fresh = itertools.count(1_000_000)
    return [next(fresh) if number % 2000 >= 1400 else pick() for number in range(requests)]


def _loop(requests: int, dice: random.Random, length: int = 2500) -> list[int]:
    """Requests in a loop over 2,500 objects, with one in ten for another object by Zipf's law."""
    pick = _popularity(1000, 0.9, dice)
    steps = itertools.cycle(range(1_000_000, 1_000_000 + length))
    return [pick() if dice.random() < 0.1 else next(steps) for _ in range(requests)]


def _shifting(requests: int, dice: random.Random, objects: int = 2500, every: int = 5000) -> list[int]:
    """Requests by Zipf's law over a working set of which half is replaced every 5,000 requests."""
    pick = _popularity(objects, 0.9, dice)
    return [pick() + number // every * (objects // 2) for number in range(requests)]


def _popularity(objects: int, exponent: float, dice: random.Random) -> Callable[[], int]:
    # Random.random alone gives the same numbers in every version of Python; its other methods may change.
    weights = itertools.accumulate((rank + 1) ** -exponent for rank in range(objects))
    bounds = list(weights)
    names = list(range(objects))
    for last in range(objects - 1, 0, -1):
        other = int(dice.random() * (last + 1))
        names[last], names[other] = names[other], names[last]
    return lambda: names[min(bisect.bisect(bounds, dice.random() * bounds[-1]), objects - 1)]


_Generator = Callable[[int, random.Random], list[int]]
KINDS: dict[str, _Generator] = {"zipf": _zipf, "scan": _scan, "loop": _loop, "shifting": _shifting}
"""Generators by the names of their patterns."""
