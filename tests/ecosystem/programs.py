"""The matrix: every program that is run plain and in a pool."""

from tests.ecosystem import generation, optimizers, perception_models, text_models

__all__ = ["PROGRAMS"]

PROGRAMS = [
    *text_models.PROGRAMS,
    *perception_models.PROGRAMS,
    *generation.PROGRAMS,
    *optimizers.PROGRAMS,
]
