"""Several threads at once; and what is global is as it was, whatever happens."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def globals_now() -> tuple[object, ...]:
    return (
        sys.stdout,
        sys.stderr,
        logging.root.manager.disable,
        torch.backends.mha.get_fastpath_enabled(),
        list(warnings.filters),
        torch.is_grad_enabled(),
        torch.random.get_rng_state().tolist(),
    )


def test_four_threads_compress_at_once() -> None:
    model, x = network(), torch.randn(2, 6)
    wanted, before = nm.compress(model, x).model.state_dict(), globals_now()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: nm.compress(model, x).model.state_dict(), range(12)))
    assert all(torch.equal(own[name], value) for own in found for name, value in wanted.items())
    assert globals_now() == before


class Raising(nn.Module):
    """Fails while it is captured."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(4, 4), error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error

    def __deepcopy__(self, memo: object) -> Raising:
        return self


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no"), SystemExit(1)], ids=repr)
def test_nothing_global_is_left_changed_after_an_error(error: BaseException) -> None:
    model, x = Raising(error), torch.randn(2, 4)
    before = globals_now()
    with pytest.raises((nm.MergingError, type(error))):
        nm.compress(model, x)
    assert globals_now() == before
    with ThreadPoolExecutor(1) as pool:  # the lock is free again
        assert pool.submit(nm.compress, network(), torch.randn(2, 6)).result(120).summary.error is not None


def test_other_threads_go_on_printing_while_a_network_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            print("from the network")
            other = threading.Thread(target=print, args=("from elsewhere",))
            other.start()
            other.join()
            y: Tensor = self.b(self.a(x).relu())
            return y

    from neuron_merging.graph.capture import capture

    capture(Waiting(), torch.zeros(1, 4))
    said = capsys.readouterr().out
    assert "from elsewhere" in said and "from the network" not in said
