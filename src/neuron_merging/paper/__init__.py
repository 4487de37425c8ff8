"""paper: the paper's tables and figures, computed again and set beside what was printed.

settings → printed → cells (cached) → rows and claims → table, CSV, pictures and page.
"""
