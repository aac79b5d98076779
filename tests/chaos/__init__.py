"""A whole pool of real processes on networks of their own, with seeded faults. `scripts/chaos` starts a run."""
