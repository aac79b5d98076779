"""Programs that engines' interpreters run; each prints its facts as one line of JSON."""
