"""Reports and pictures of a pool's activity."""
