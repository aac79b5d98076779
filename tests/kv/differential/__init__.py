"""Differential runs of KV blocks: many clients, faults of every kind, and bytes that can be told from all others."""
