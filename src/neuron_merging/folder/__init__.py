"""folder: results on disk."""
