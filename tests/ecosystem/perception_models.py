"""Models of transformers that see, hear or forecast: a forward pass and two steps of training for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf

from tests.ecosystem.program import Place, Program
from tests.ecosystem.text_models import VOCABULARY, tokens, train

__all__ = ["PROGRAMS"]

_VIT = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_labels": 5,
}
_CLIP_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
    "projection_dim": 16,
}
_CLIP_VISION = {**_VIT, "num_hidden_layers": 2, "projection_dim": 16}
_SOUND = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": VOCABULARY,
    "mask_time_prob": 0.0,
}

Batch = dict[str, Any]


def _pictures() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _labelled() -> Batch:
    return {**_pictures(), "labels": torch.tensor([1, 3])}


def _pairs() -> Batch:
    return {**_pictures(), "input_ids": tokens(2, 8), "return_loss": True}


def _segments() -> Batch:
    return {**_pictures(), "labels": torch.randint(0, 5, (2, 32, 32))}


def _boxes() -> Batch:
    return {
        **_pictures(),
        "labels": [
            {"class_labels": torch.tensor([1, 2]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.2, 0.4]])},
            {"class_labels": torch.tensor([0]), "boxes": torch.tensor([[0.6, 0.4, 0.4, 0.2]])},
        ],
    }


def _clip() -> torch.nn.Module:
    return hf.CLIPModel(hf.CLIPConfig(text_config=_CLIP_TEXT, vision_config=_CLIP_VISION, projection_dim=16))


def _siglip() -> torch.nn.Module:
    return hf.SiglipModel(
        hf.SiglipConfig(
            text_config={**_CLIP_TEXT, "projection_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            vision_config=_CLIP_VISION,
        )
    )


def _detr() -> torch.nn.Module:
    backbone = hf.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"], layer_type="basic"
    )
    return hf.DetrForObjectDetection(
        hf.DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_queries=6,
            num_labels=4,
        )
    )


def _speech() -> Batch:
    return {"input_features": torch.randn(2, 16, 40), "labels": tokens(2, 8)}


def _sound() -> Batch:
    return {"input_values": torch.randn(2, 800), "labels": tokens(2, 6)}


def _series() -> Batch:
    return {"past_values": torch.randn(2, 32, 3), "future_values": torch.randn(2, 8, 3)}


_MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], Batch]]] = {
    "beit": (lambda: hf.BeitForImageClassification(hf.BeitConfig(**_VIT)), _labelled),
    "clip": (_clip, _pairs),
    "convnext": (
        lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 2, 1], image_size=32, num_labels=5)
        ),
        _labelled,
    ),
    "deit": (lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**_VIT)), _labelled),
    "detr": (_detr, _boxes),
    "dinov2": (lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**_VIT)), _labelled),
    "hubert": (lambda: hf.HubertForCTC(hf.HubertConfig(**_SOUND)), _sound),
    "mobilenet_v2": (
        lambda: hf.MobileNetV2ForImageClassification(
            hf.MobileNetV2Config(image_size=32, depth_multiplier=0.25, min_depth=4, num_labels=5)
        ),
        _labelled,
    ),
    "patchtst": (
        lambda: hf.PatchTSTForPrediction(
            hf.PatchTSTConfig(
                num_input_channels=3,
                context_length=32,
                patch_length=8,
                patch_stride=8,
                prediction_length=8,
                d_model=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                ffn_dim=64,
            )
        ),
        _series,
    ),
    "resnet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 24, 32, 32], depths=[1, 1, 2, 1], layer_type="basic", num_labels=5
            )
        ),
        _labelled,
    ),
    "segformer": (
        lambda: hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(
                depths=[1, 1, 1, 1],
                hidden_sizes=[16, 16, 32, 32],
                num_attention_heads=[1, 2, 2, 4],
                mlp_ratios=[2, 2, 2, 2],
                decoder_hidden_size=32,
                num_labels=5,
            )
        ),
        _segments,
    ),
    "siglip": (_siglip, _pairs),
    "swin": (
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5
            )
        ),
        _labelled,
    ),
    "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**_VIT)), _labelled),
    "wav2vec2": (lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_SOUND)), _sound),
    "whisper": (
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                vocab_size=VOCABULARY,
                num_mel_bins=16,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                max_source_positions=20,
                max_target_positions=20,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            )
        ),
        _speech,
    ),
}


def _forward(name: str) -> Callable[[Place], Iterator[torch.Tensor]]:
    make, batch = _MODELS[name]

    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(make().eval())
        values = batch()
        with torch.no_grad():
            for _ in range(2):
                outputs = model(**values)
                yield outputs.loss
                yield from (value for value in outputs.to_tuple() if isinstance(value, torch.Tensor))

    return run


def _training(name: str) -> Callable[[Place], Iterator[torch.Tensor]]:
    make, batch = _MODELS[name]

    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(make().train())
        yield from train(model, batch())

    return run


PROGRAMS = [
    program
    for name in _MODELS
    for program in (
        Program(f"transformers/{name}/forward", _forward(name)),
        Program(f"transformers/{name}/train", _training(name), copies=4),
    )
]
