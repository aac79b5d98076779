"""The manager: an HTTP API over the registry (docs/manager.md).

A manager has no state of its own. Several may run with the same registry, and all of them answer. One of them holds the
role of the leader, which is for work that only one manager may do at a time.
"""
