"""NIXL as a one-sided fabric for farpool (docs/nixl.md)."""
