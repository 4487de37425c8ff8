"""Measure the latency of networks side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.example_inputs import call_model, infer_batch_size

MIN_RUNS = 3
"""Runs that are always measured, even beyond the time limit: a median of fewer is not robust."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a forward pass: the median over runs, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise the times of single runs."""
        ordered = sorted(seconds)
        # With fewer than ten runs this is 0, and the range that of all runs.
        tenth = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))

    def __str__(self) -> str:
        return f"{self.median * 1e3:.2f} ({self.low * 1e3:.2f}–{self.high * 1e3:.2f})"


NetworkCallable = Callable[..., Any]
"""Computes outputs from positional inputs: a module, or a session of another runtime."""


def measure_latencies(
    networks: Mapping[str, NetworkCallable],
    inputs: tuple[Any, ...],
    batches: Sequence[int],
    runs: int,
    seconds: float = float("inf"),
) -> dict[str, dict[int, float]]:
    """Return the median seconds of a forward pass, by network and batch size; see `measure_timings`."""
    timings = measure_timings(networks, inputs, batches, runs, seconds)
    return {name: {size: timing.median for size, timing in by_size.items()} for name, by_size in timings.items()}


@torch.inference_mode()
def measure_timings(
    networks: Mapping[str, NetworkCallable],
    inputs: tuple[Any, ...],
    batches: Sequence[int],
    runs: int,
    seconds: float = float("inf"),
) -> dict[str, dict[int, Timing]]:
    """Measure forward passes, by network and batch size.

    Each batch size gets `runs` runs, or fewer if they would take longer than `seconds`.
    """
    timings: dict[str, dict[int, Timing]] = {name: {} for name in networks}
    for size in batches:
        batch = tree_map(lambda value, size=size: _expand_to_batch_size(value, size), tuple(inputs))
        _warm_up(networks, batch, size)
        times: dict[str, list[float]] = {name: [] for name in networks}
        start = time.perf_counter()
        for run in range(runs):
            if run >= MIN_RUNS and time.perf_counter() - start > seconds:
                break
            # Networks take turns, so that a change of clock rate or load affects all of them.
            for name, network in networks.items():
                times[name].append(_time_call(network, batch))
        for name, run_times in times.items():
            timings[name][size] = Timing.of(run_times)
    return timings


DEFAULT_BATCHES = (1, 16)
"""Batch sizes that are timed unless others are asked for."""


def find_default_batches(networks: Mapping[str, NetworkCallable], inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the default batch sizes; only the example's if a network does not take one of them."""
    try:
        for size in DEFAULT_BATCHES:
            _warm_up(networks, tree_map(partial(_expand_to_batch_size, size=size), tuple(inputs)), size)
    except MergingError:
        return (infer_batch_size(inputs),)
    return DEFAULT_BATCHES


def _warm_up(networks: Mapping[str, NetworkCallable], batch: tuple[Any, ...], size: int) -> None:
    """Run every network once: first calls allocate memory and choose kernels."""
    for name, network in networks.items():
        try:
            call_model(network, batch)
        except Exception as error:
            what = f"the {name} network does not take a batch of {size}: {describe_error(error)}"
            raise MergingError(what, where="batch", fix="Give a batch size that it takes.") from error


def _time_call(network: NetworkCallable, batch: tuple[Any, ...]) -> float:
    _wait_for_accelerator()
    start = time.perf_counter()
    call_model(network, batch)
    _wait_for_accelerator()
    return time.perf_counter() - start


def _wait_for_accelerator() -> None:
    """Wait until the accelerator is idle: a call returns as soon as its work is queued."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _expand_to_batch_size(value: Any, size: int) -> Any:
    """Repeat the first sample; a contiguous copy, because expanded strides would change the timing."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    return value[:1].expand(size, *value.shape[1:]).clone(memory_format=torch.contiguous_format)
