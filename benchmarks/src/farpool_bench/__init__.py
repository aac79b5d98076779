"""Benchmarks of farpool, measured next to the limit of the machine and next to the alternatives.

Each is a module with a class `Bench` (see `farpool_bench.harness`). Importing one needs neither torch nor matplotlib,
so that the command shows its help at once and a result can be read anywhere: both are imported where they are used.
"""
