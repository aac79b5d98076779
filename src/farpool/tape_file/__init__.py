"""Tape files: a program's accesses and compute times, for replay. The format is in docs/tape-file.md."""

from farpool.tape_file.reader import TapeFile
from farpool.tape_file.records import Access, Content, Create, Free, Metadata, Record, Run
from farpool.tape_file.writer import TapeWriter

__all__ = ["Access", "Content", "Create", "Free", "Metadata", "Record", "Run", "TapeFile", "TapeWriter"]
