"""Connections to nodes: addresses, frames, the handshake, access keys, control calls (docs/wire.md)."""
