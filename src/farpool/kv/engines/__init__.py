"""Connectors: classes through which serving engines and libraries use the KV cache of farpool.

Each module imports its engine, so import only the module that you need. The names `farpool.kv.vllm`,
`farpool.kv.sglang` and `farpool.kv.lmcache` also work, because configurations of the engines use them.
"""
