"""Store compressed networks on disk: folders, recipes, and exports."""
