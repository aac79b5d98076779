"""Settings for all tests: what Hypothesis draws is the same in every run."""

from hypothesis import settings

settings.register_profile("farpool", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("farpool")
