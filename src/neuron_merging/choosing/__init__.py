"""choosing: which channels stay."""
