"""The ``farpool`` command: a thin layer over the library, with one file for each verb."""
