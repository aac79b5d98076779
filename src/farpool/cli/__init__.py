"""The command ``farpool``: thin, one file a verb."""
