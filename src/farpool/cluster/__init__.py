"""Memory of many processes and hosts: connections, nodes, the store of objects, names and the registry."""
