"""Operator rules: how each operator passes on channel labels, by family, and the table of all operators."""
