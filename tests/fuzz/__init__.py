"""Fuzzing: compress random networks and compare the results with an independent oracle.

Run it with `python -m tests.fuzz --graphs 5000 --seed 0 --jobs 2`.

`kinds` holds the blocks and `network` composes them. `oracle` computes the expected outputs from the original's tensors
and the plan alone. `trial` runs one case and classifies its outcome. `minimise` shortens a failing case.
"""
