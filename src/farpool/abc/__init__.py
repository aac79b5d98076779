"""Contracts that tiers and other replaceable parts keep: one file for each, and no logic."""
