"""Prune a network: plan, surgery on a copy, and verification of the result."""
