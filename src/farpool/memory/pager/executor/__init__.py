"""Executors, which run the pager's transfers."""
