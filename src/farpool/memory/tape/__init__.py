"""Tape files: a program's accesses and compute times, for replay. The format is in docs/tape-file.md."""

from farpool.memory.tape.reader import TapeFile
from farpool.memory.tape.records import Access, Content, Create, Free, Metadata, Record, Run
from farpool.memory.tape.writer import TapeWriter

__all__ = ["Access", "Content", "Create", "Free", "Metadata", "Record", "Run", "TapeFile", "TapeWriter"]
