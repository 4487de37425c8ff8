"""demo: the whole tool in a minute, on data that comes with scikit-learn."""

from __future__ import annotations


def demo(*, out: str = "neuron-merging-demo") -> None:
    """Train a small network on scikit-learn's digits and compress it in three ways.

    Parameters
    ----------
    out
        The folder for the networks and the page.
    """
    from neuron_merging.tool import demo

    demo.main(out)
