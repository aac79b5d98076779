"""The matrix: every program that is run plain and in a pool."""

from tests.ecosystem import (
    adapters,
    diffusion,
    generation,
    optimizers,
    perception_models,
    text_models,
    torch_features,
    trainers,
)

__all__ = ["PROGRAMS"]

PROGRAMS = [
    *text_models.PROGRAMS,
    *perception_models.PROGRAMS,
    *generation.PROGRAMS,
    *optimizers.PROGRAMS,
    *torch_features.PROGRAMS,
    *adapters.PROGRAMS,
    *diffusion.PROGRAMS,
    *trainers.PROGRAMS,
]
