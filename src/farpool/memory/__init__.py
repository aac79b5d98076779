"""Memory of one process: the pool, the pager, the tiers below it, recordings and debug mode."""
