"""Runs the engine's transfers."""
