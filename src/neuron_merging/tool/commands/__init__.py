"""commands: the command line, one file per command; torch is imported inside the functions."""
