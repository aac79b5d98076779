"""Benchmarks of farpool, measured beside the limit of the machine and beside the alternatives.

One module a benchmark, each with the same five names (see `farpool_bench.benchmark`): ``Settings``, ``Outcome``,
``run``, ``table`` and ``figures``; the first line of its docstring is its title in reports. Importing one needs neither
torch nor matplotlib, so that the command shows its help at once and a result can be read anywhere: what needs them is
imported where it runs.

The method is the same everywhere. Memory is warmed first; what is compared runs in turn, in pairs, in one run; the
median of the ratios is quoted and the samples stay in the result.
"""
