"""The paths of the API, one file for each kind of resource. `farpool.cluster.manager.app` includes them."""
