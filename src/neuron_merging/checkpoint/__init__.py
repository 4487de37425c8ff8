"""Compressed networks on disk: folders, recipes, and exports."""
