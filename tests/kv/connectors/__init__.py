"""Connectors of farpool.kv against the engines' releases, each in an environment of its own (`make kv-envs`)."""
