"""cutting: from a choice to a smaller network that is checked."""
