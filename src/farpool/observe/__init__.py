"""What a pool did, made visible."""
