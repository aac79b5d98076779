"""Diffusion with diffusers: denoisers, autoencoders, schedulers, and the pipelines that put them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.ecosystem.program import Place, Program
from tests.ecosystem.text_models import VOCABULARY

__all__ = ["PROGRAMS"]

_UNET = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}


def _unet(channels: int = 3) -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        in_channels=channels,
        out_channels=channels,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        **_UNET,
    )


def _conditional() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **_UNET,
    )


def _autoencoder() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
    )


def _dit() -> Any:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    )


def _flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def _sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=8,
        pooled_projection_dim=32,
        out_channels=4,
    )


def _pictures() -> dict[str, Any]:
    return {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([3, 700])}


def _latents() -> dict[str, Any]:
    return {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 700])}


_MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "AutoencoderKL": (_autoencoder, lambda: {"sample": torch.randn(2, 3, 16, 16)}),
    "DiT": (
        _dit,
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([3, 700]),
            "class_labels": torch.tensor([1, 4]),
        },
    ),
    "Flux": (
        _flux,
        lambda: {
            "hidden_states": torch.randn(2, 16, 4),
            "timestep": torch.tensor([0.1, 0.7]),
            "pooled_projections": torch.randn(2, 32),
            "encoder_hidden_states": torch.randn(2, 5, 32),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(5, 3),
        },
    ),
    "SD3": (
        _sd3,
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([3, 700]),
            "pooled_projections": torch.randn(2, 32),
            "encoder_hidden_states": torch.randn(2, 5, 32),
        },
    ),
    "UNet2D": (_unet, _pictures),
    "UNet2DCondition": (_conditional, lambda: {**_latents(), "encoder_hidden_states": torch.randn(2, 5, 32)}),
}


def _forward(name: str) -> Callable[[Place], Iterator[torch.Tensor]]:
    make, batch = _MODELS[name]

    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(make().eval())
        values = batch()
        with torch.no_grad():
            for _ in range(2):
                yield model(**values).sample

    return run


def _training(name: str) -> Callable[[Place], Iterator[torch.Tensor]]:
    make, batch = _MODELS[name]

    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(make().train())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        values = batch()
        for _ in range(2):
            loss = model(**values).sample.square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield loss
        yield from model.parameters()

    return run


def _sampling(scheduler: str, **settings: Any) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        import diffusers

        schedule = getattr(diffusers, scheduler)(num_train_timesteps=100, **settings)
        model = place(_unet().eval())
        schedule.set_timesteps(4)
        sample = torch.randn(1, 3, 8, 8) * schedule.init_noise_sigma
        with torch.no_grad():
            for step in schedule.timesteps:
                noise = model(schedule.scale_model_input(sample, step), step).sample
                sample = schedule.step(noise, step, sample).prev_sample
                yield sample

    return run


def _unconditional_pipeline(place: Place) -> Iterator[torch.Tensor]:
    from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler

    unet = place(_unet().eval())
    for schedule in (DDPMScheduler(num_train_timesteps=100), DDIMScheduler(num_train_timesteps=100)):
        pipeline = DDPMPipeline(unet, schedule)
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(3)
        images = pipeline(batch_size=1, num_inference_steps=3, generator=generator, output_type="np").images
        yield torch.from_numpy(images)


def _stable_diffusion(place: Place) -> Iterator[torch.Tensor]:
    """Guidance, cross-attention, and a decoder: all three models of the pipeline share the pool."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline
    from transformers import CLIPTextConfig, CLIPTextModel

    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    pipeline = StableDiffusionPipeline(
        vae=place(_autoencoder().eval()),
        text_encoder=place(text.eval()),
        tokenizer=None,
        unet=place(_conditional().eval()),
        scheduler=DDIMScheduler(num_train_timesteps=100, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        prompt = text(torch.randint(3, VOCABULARY, (1, 7))).last_hidden_state
        nothing = text(torch.zeros(1, 7, dtype=torch.long)).last_hidden_state
    images = pipeline(
        prompt_embeds=prompt,
        negative_prompt_embeds=nothing,
        num_inference_steps=3,
        guidance_scale=4.0,
        height=16,
        width=16,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
    ).images
    yield torch.from_numpy(images)


def _denoising(place: Place) -> Iterator[torch.Tensor]:
    """The training loop of diffusers' own examples, with the running average of the weights that they keep."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel

    model = place(_unet().train())
    average = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True)
    schedule = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        clean, noise = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
        steps = torch.randint(0, 100, (2,))
        loss = torch.nn.functional.mse_loss(model(schedule.add_noise(clean, noise, steps), steps).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        yield loss
    yield from average.shadow_params
    average.store(model.parameters())
    average.copy_to(model.parameters())
    with torch.no_grad():
        yield model(clean, steps).sample
    average.restore(model.parameters())
    yield from model.parameters()


PROGRAMS = [
    *(
        program
        for name in _MODELS
        for program in (
            Program(f"diffusers/{name}/forward", _forward(name)),
            Program(f"diffusers/{name}/train", _training(name), copies=4),
        )
    ),
    Program("diffusers/DDPM/sample", _sampling("DDPMScheduler")),
    Program("diffusers/DDIM/sample", _sampling("DDIMScheduler")),
    Program("diffusers/Euler/sample", _sampling("EulerDiscreteScheduler")),
    Program("diffusers/DPM-Solver/sample", _sampling("DPMSolverMultistepScheduler")),
    Program("diffusers/DDPMPipeline", _unconditional_pipeline),
    Program("diffusers/StableDiffusionPipeline", _stable_diffusion),
    Program("diffusers/DDPM/train with a running average", _denoising, copies=5),
]
