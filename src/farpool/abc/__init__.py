"""Interfaces of tiers and of other replaceable parts: one file for each interface, without logic."""
