"""Each network in a process of its own: none can take the others with it, by its time, its memory or its end."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import zoo_networks

Row = dict[str, Any]


def alone(work: Callable[..., Row], arguments: tuple[Any, ...], limit: float) -> Row:
    """What `work` returns, from a process that has the packages already: importing takes longer than most cuts."""
    workers = multiprocessing.get_context("forkserver")
    workers.set_forkserver_preload(["zoo_networks", "torch._dynamo", *zoo_networks.PACKAGES[:3]])
    ours, theirs = workers.Pipe(duplex=False)
    process = workers.Process(target=_reported, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(limit) else {"crash": f"not done after {limit:.0f} s"}
    except EOFError:
        process.join()
        return {"crash": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _reported(found: Connection, work: Callable[..., Row], arguments: tuple[Any, ...]) -> None:
    """What a process of its own does; what networks print is dropped."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        found.send(work(*arguments))
    except Exception as error:  # noqa: BLE001 (a crash is a finding)
        found.send({"crash": f"{type(error).__name__}: {error}"[:300]})
