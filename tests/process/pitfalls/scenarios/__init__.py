"""The scenarios, one file a family."""
