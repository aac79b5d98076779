"""Parts of the benchmark of a shared pool, one module each, and the programs that they run.

A part is a module with a function `measure`, which returns a row. The row's field `figures` has the numbers that are
compared with the targets (`farpool_bench.cluster_parts.figures`), and the other fields have the samples.
"""
