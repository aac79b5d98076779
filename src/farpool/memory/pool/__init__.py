"""The pool that a program sees, and its parts: configuration, blocks, budget, accounts."""

from farpool.memory.pool.pool import Pool, TensorLibrary, blocks_of, pool_of, use_tensors

__all__ = ["Pool", "TensorLibrary", "blocks_of", "pool_of", "use_tensors"]
