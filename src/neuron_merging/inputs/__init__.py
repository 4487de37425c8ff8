"""Inputs that merges are fitted on, cuts are tried on and results are judged on."""
