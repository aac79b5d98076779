"""Tests of the repair of copies."""
