"""Random networks against an oracle of their own: `python -m tests.fuzz --graphs 5000 --seed 0 --jobs 2`.

`kinds` holds the blocks, `network` composes them, `oracle` says what the smaller network has to compute (from the
original's tensors and the plan alone), `trial` runs one case and names its outcome, `minimise` shortens a failure.
"""
