"""Download a file; it appears only when it is complete and its checksum is right."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

from neuron_merging import atomic
from neuron_merging.errors import MergingError


def download_file(url: str, target: Path, md5: str) -> None:
    """Download to `target`, which appears only whole and checked; goes on where it broke off."""
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic.lock_path(target):
            if target.exists():  # another process has fetched it meanwhile
                return
            _receive_part(url, part)
            with part.open("rb") as file:
                found = hashlib.file_digest(file, "md5").hexdigest()
            if found == md5:
                os.replace(part, target)
                return
            part.unlink()
    except (OSError, http.client.HTTPException) as error:
        fix = f"Run again, it goes on from {part}; or give a root that can be written"
        raise MergingError(f"download failed: {error}", where=url, fix=fix) from error
    what = f"the download has md5 {found}, published is {md5}; it was removed"
    raise MergingError(what, where=url, fix="Run again, or get the file by another way")


def _receive_part(url: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # nothing is left to send: the checksum decides
            return
        raise
    with response:
        have = have if response.status == 206 else 0
        left = int(response.headers["Content-Length"] or 0)
        with part.open("ab" if have else "wb") as file:
            _copy_with_progress(response, file, part.stem, have, have + left)
        if part.stat().st_size < have + left:
            raise OSError(f"the connection ended {have + left - part.stat().st_size} bytes early")


def _copy_with_progress(response: Any, file: IO[bytes], title: str, have: int, total: int) -> None:
    from rich import console, progress

    columns = ("{task.description}", progress.BarColumn(), progress.DownloadColumn())
    with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total or None, completed=have)
        while chunk := response.read(1 << 16):
            file.write(chunk)
            bar.advance(task, len(chunk))
