"""How copies of objects are made again and moved, decided without I/O: see `engine`. And the copying of one object."""
