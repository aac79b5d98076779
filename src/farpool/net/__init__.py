"""One way to a node: addresses, frames, the handshake, access keys, control calls (docs/wire.md)."""
