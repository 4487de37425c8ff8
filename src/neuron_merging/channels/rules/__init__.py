"""Operator rules: how each operator carries channel labels, by family, in one table."""
