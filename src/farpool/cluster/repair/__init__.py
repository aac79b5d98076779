"""Repair: decides without I/O which copies of objects are made, moved and dropped (`engine`), and copies one object."""
