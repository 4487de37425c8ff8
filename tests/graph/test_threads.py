"""Several threads at once; process-wide state is restored, whatever happens."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.graph.capture import capture
from neuron_merging.graph.process_state import exclusive_access, seed_rng, silence_logging

T = TypeVar("T")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def globals_now() -> tuple[object, ...]:
    return (
        sys.stdout,
        sys.stderr,
        logging.root.manager.disable,
        logging.Logger.callHandlers,
        torch.backends.mha.get_fastpath_enabled,
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

    capture(Waiting(), torch.zeros(1, 4))
    said = capsys.readouterr().out
    assert "from elsewhere" in said and "from the network" not in said


def in_another_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


class Asking(nn.Module):
    """Looks, while it runs, at what another thread is given."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__()
        self.a, self.b, self.ask = nn.Linear(4, 8), nn.Linear(8, 2), ask

    def forward(self, x: Tensor) -> Tensor:
        in_another_thread(self.ask)
        logging.getLogger("the.network").error("from the network")
        warnings.warn("from the network", stacklevel=1)
        y: Tensor = self.b(self.a(x).relu())
        return y


def test_other_threads_log_and_warn_while_a_network_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    warned: list[str] = []

    def tell() -> None:
        logging.getLogger("elsewhere").error("from elsewhere")
        warnings.warn("from elsewhere", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: warned.append(str(message))
        capture(Asking(tell), torch.zeros(1, 4))
    assert {record.message for record in caplog.records if record.levelno >= logging.WARNING} == {"from elsewhere"}
    assert set(warned) == {"from elsewhere"}


def test_other_threads_keep_their_attention_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """And may switch them while a network is captured."""
    enabled: list[bool] = []

    def ask() -> None:
        enabled.append(torch.backends.mha.get_fastpath_enabled())

    capture(Asking(ask), torch.zeros(1, 4))
    assert enabled and all(enabled)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)
    capture(Asking(lambda: torch.backends.mha.set_fastpath_enabled(False)), torch.zeros(1, 4))
    assert not torch.backends.mha.get_fastpath_enabled()


def test_a_warning_filter_that_another_thread_copied_is_without_effect_later() -> None:
    with silence_logging():
        kept = list(warnings.filters)
    with warnings.catch_warnings(record=True) as found:
        warnings.filters = kept
        warnings.simplefilter("always", append=True)
        warnings.filters[1:-1] = []  # type: ignore[index]
        warnings.warn("heard", stacklevel=1)
    assert [str(warning.message) for warning in found] == ["heard"]


class FakeAccelerator:
    """Two devices' random generators, each a number."""

    def __init__(self) -> None:
        self.states = [7, 8]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """As torch.cuda, which is not here."""
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states))
        patch.setattr(torch.cuda, "set_rng_state_all", lambda states: self.states.__setitem__(slice(None), states))
        patch.setattr(torch.cuda, "manual_seed_all", lambda seed: self.states.__setitem__(slice(None), [seed, seed]))


def test_the_generators_of_accelerators_are_seeded_for_a_while_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeAccelerator()
    fake.install(monkeypatch)
    with exclusive_access():
        seed_rng(3)
        assert fake.states == [3, 3]
    assert fake.states == [7, 8]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        nm.compress(network(), torch.randn(2, 6), budget={"params": 0.5})
    assert fake.states == [7, 8]  # nor are they seeded when nothing is on them yet
