"""Programs that engines' interpreters run; each prints what it found as one line of JSON."""
