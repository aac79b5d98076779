"""The demo, also called the main job: an embedding model searches text with a quarter of its weights resident."""
