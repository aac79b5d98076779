"""Memory of one process: the pool, the pager, the lower tiers, recordings and debug mode."""
