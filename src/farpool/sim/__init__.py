"""A whole pool in one process, under virtual time, with seeded faults (`farpool sim`)."""
