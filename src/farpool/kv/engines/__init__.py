"""Connectors: classes through which serving engines and libraries use the KV cache of farpool.

The modules import their engine, so import the one that you need. `farpool.kv.vllm`, `farpool.kv.sglang` and
`farpool.kv.lmcache` stay valid names of the modules here, because configurations of the engines name them.
"""
