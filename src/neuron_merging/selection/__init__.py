"""Which channels are kept, and how many of each group."""
