"""Failures that were reported in public for shared KV caches, each with farpool in that position."""
