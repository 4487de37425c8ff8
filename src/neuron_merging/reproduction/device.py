"""Choose the device to compute on."""

from __future__ import annotations

import torch

from neuron_merging.errors import MergingError, describe_error


def find_device(name: str | torch.device | None) -> torch.device:
    """The device of that name; without one the accelerator, if there is any, else the CPU."""
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        found = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        what = f"there is no device {str(name)!r}: {describe_error(error)}"
        raise MergingError(what, where="--device", fix="Give cpu, cuda or cuda:1.") from error
    if found.type == "meta":
        raise MergingError("nothing is computed on the device 'meta'", where="--device", fix="Give cpu or cuda.")
    return found
