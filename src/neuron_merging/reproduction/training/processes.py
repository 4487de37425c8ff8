"""Choose the device, and train in one process or in several that `accelerate launch` started."""

from __future__ import annotations

import atexit
import os
import time
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from neuron_merging.calibration.distributed import ProcessGroup
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.user_code import import_module_or_raise


def find_device(name: str | torch.device | None) -> torch.device:
    """Return the device of a name; without a name, the accelerator if there is one, else the CPU."""
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        # Creating a tensor is the only test that a device works, not only that its name is well-formed.
        found = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        what = f"there is no device {str(name)!r}: {describe_error(error)}"
        raise MergingError(what, where="--device", fix="Give cpu, cuda or cuda:1.") from error
    if found.type == "meta":
        raise MergingError("the device 'meta' does not compute values", where="--device", fix="Give cpu or cuda.")
    return found


SHUTDOWN_SECONDS = 1.0
"""Seconds that the threads of a process group get to finish after the last collective operation."""


class TrainingProcesses(ProcessGroup, Protocol):
    """The processes that train one model together."""

    device: torch.device

    def prepare(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Wrap model and optimiser for the training loop."""

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the network without its wrapper."""

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, averaged over the processes."""

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of the first process to all: batch-norm statistics differ, as each sees other images."""


class SingleProcess:
    """Training in this process only."""

    rank, count = 0, 1

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.device = find_device(device)

    def prepare(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        return model, optimiser

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def total(self, values: Tensor) -> Tensor:
        return values

    def broadcast_buffers(self, model: nn.Module) -> None:
        return None


class AccelerateProcess:
    """One of the processes that `accelerate launch` started."""

    def __init__(self) -> None:
        accelerate = import_module_or_raise("accelerate", "pip install 'neuron-merging[train]'", "train", MergingError)
        self._accelerator = accelerate.Accelerator(cpu=not torch.accelerator.is_available())
        self._utils = accelerate.utils
        self.rank: int = self._accelerator.process_index
        self.count: int = self._accelerator.num_processes
        self.device: torch.device = self._accelerator.device
        atexit.register(_shut_down_group)

    def prepare(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        wrapped, stepper = self._accelerator.prepare(model, optimiser)
        return wrapped, stepper

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        plain: nn.Module = self._accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        return plain

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def total(self, values: Tensor) -> Tensor:
        found: Tensor = self._accelerator.reduce(values, "sum")
        return found

    def broadcast_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            buffer.copy_(self._utils.broadcast(buffer.clone()))


def _shut_down_group() -> None:
    """Destroy the process group before Python exits, and wait for its threads.

    A collective operation returns before its thread has released the result, for which the thread needs the GIL. If
    Python has already shut down by then, the process crashes.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(SHUTDOWN_SECONDS)


def detect_processes(device: str | None = None) -> TrainingProcesses:
    """Return the processes of the launcher, or this process alone."""
    # `accelerate launch` sets this variable even for one process; torchrun sets WORLD_SIZE.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ or int(os.environ.get("WORLD_SIZE", 1)) > 1
    return AccelerateProcess() if launched else SingleProcess(device)
