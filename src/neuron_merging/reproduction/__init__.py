"""The paper's experiments, run again and compared with the published values; training; the demo.

Nothing else in the package imports it. Its networks, data sets and comparison methods are known by name all the same:
`register` is an entry point, which the registries call when they do not know a name.
"""

from importlib import import_module


def register() -> None:
    """Add the paper's networks, data sets and comparison methods to the registries."""
    for module in ("networks", "datasets"):
        import_module(f"{__name__}.{module}").register()
    import_module(f"{__name__}.comparison_methods")  # each method registers itself when it is defined
