"""Make or read the inputs that merges are fitted on, cuts are tried on and results are judged on."""
