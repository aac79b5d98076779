"""Memory of devices, for the queue that runs the pager's transfers there."""
