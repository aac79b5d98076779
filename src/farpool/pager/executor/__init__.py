"""Runs the pager's transfers."""
