"""The simulated pool."""
