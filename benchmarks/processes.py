"""Run each network in its own process, so that a timeout, a crash or lack of memory does not affect the others."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import zoo_networks

Row = dict[str, Any]


def alone(work: Callable[..., Row], arguments: tuple[Any, ...], limit: float) -> Row:
    """Run `work` in a forked process, which inherits imported packages: importing takes longer than most cuts."""
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
    """Run in the child process; drop what networks print."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        found.send(work(*arguments))
    except Exception as error:  # noqa: BLE001 (a crash is a finding)
        found.send({"crash": f"{type(error).__name__}: {error}"[:300]})
