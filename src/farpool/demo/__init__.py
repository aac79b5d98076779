"""The main job: a real sentence-embedding model searches real text with a quarter of its weights resident."""
