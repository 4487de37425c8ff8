"""The manifest of a folder: plan.json, with the sums of the other files."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

import neuron_merging
from neuron_merging.cutting.plan import VERSION as PLAN_VERSION
from neuron_merging.cutting.plan import Plan
from neuron_merging.errors import FolderError, told

VERSION = 1
WEIGHTS, PLAN, RECIPE, CARD = "model.safetensors", "plan.json", "recipe.yaml", "README.md"
PAGE, INPUTS = "report.html", "inputs.safetensors"

MOST_PLAN, MOST_TEXT = 1 << 28, 1 << 24
"""The largest plan.json and the largest other text, in bytes, that is read."""
PLAIN_NAME = re.compile(r"\w[\w.-]{0,99}")
DAMAGED = "Take it from its source again."
T = TypeVar("T")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What plan.json holds: the plan, and what is needed to trust and to understand the rest.

    `shared` maps every further name of a tensor to the name that it is stored under. `transient`
    names the buffers that a state dict leaves out. `digest` covers the manifest itself.
    """

    version: int = VERSION
    plan: Plan
    files: dict[str, str]
    shared: dict[str, str]
    transient: tuple[str, ...]
    parameters: tuple[int, int]
    macs: tuple[int, int]
    accuracy: tuple[float, float] | None
    versions: dict[str, str]
    digest: str = ""

    def sealed(self) -> Manifest:
        """The same with its digest."""
        bare = msgspec.structs.replace(self, digest="")
        return msgspec.structs.replace(self, digest=sha256(msgspec.json.encode(bare)))


class _Version(msgspec.Struct):
    version: int


class _Header(_Version):
    plan: _Version


def versions() -> dict[str, str]:
    return {"neuron-merging": neuron_merging.__version__, "torch": str(torch.__version__)}


def manifest_text(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest.sealed()), indent=1)


# Reading, as data from a stranger


def read_manifest(place: Path) -> Manifest:
    """The manifest of a folder."""
    return parse_manifest(_bytes(place / PLAN, MOST_PLAN), str(place / PLAN))


def plan_text(file: Path) -> bytes:
    """A plan.json, or a plan in a file of its own."""
    try:
        return _bytes(file, MOST_PLAN)
    except FolderError as error:
        raise FolderError(f"no plan: {error.what}", where=str(file), fix="Give a folder or plan.json.") from error


def read_texts(place: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, bytes]:
    """Small files of a folder, each checked against its sum."""
    texts = {name: _bytes(place / name, MOST_TEXT) for name in names}
    for name, text in texts.items():
        _check_sum(place / name, sha256(text), manifest)
    return texts


def check_sums(place: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Refuse a folder in which a file was changed; files of any size, for they are read piece by piece."""
    for name in names:
        _check_sum(place / name, digest_of(place / name), manifest)


def digest_of(file: Path) -> str:
    """The sha256 of a file, which may be larger than the memory."""
    _check_regular(file)
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_sum(file: Path, found: str, manifest: Manifest) -> None:
    if found != manifest.files.get(file.name):
        raise FolderError(
            "the file was changed or cut short: its sha256 is not the one in plan.json",
            where=str(file),
            fix="Take the folder from its source again.",
        )


def _bytes(file: Path, most: int) -> bytes:
    _check_regular(file)
    try:
        with open(file, "rb") as stream:
            data = stream.read(most + 1)
    except OSError as error:
        raise _unreadable(file, error.strerror) from error
    if len(data) > most:
        raise FolderError(f"the file is larger than {most:,} bytes", where=str(file), fix="No such file is that large.")
    return data


def _check_regular(file: Path) -> None:
    """A pipe or a device in a folder would be read for ever."""
    try:
        kind = file.stat().st_mode
    except OSError as error:
        raise _unreadable(file, error.strerror) from error
    if not stat.S_ISREG(kind):
        raise _unreadable(file, "Is a directory" if stat.S_ISDIR(kind) else "It is not an ordinary file")


def _unreadable(file: Path, why: str | None) -> FolderError:
    fix = "Give a folder that neuron-merging wrote, whole."
    return FolderError(f"the file cannot be read: {why}", where=str(file), fix=fix)


def parse_manifest(text: bytes, where: str) -> Manifest:
    """The manifest in a text, every value of it checked."""
    header = decoded(text, _Header, where)
    for name, found, known in (("folder", header.version, VERSION), ("plan", header.plan.version, PLAN_VERSION)):
        if found > known:
            raise FolderError(
                f"the {name} has format {found}, this neuron-merging reads up to {known}",
                where=where,
                fix="Update neuron-merging: pip install -U neuron-merging.",
            )
    manifest = decoded(text, Manifest, where)
    if not _sealed(text, where):
        raise FolderError("plan.json was changed by hand", where=where, fix="Take the folder from its source again.")
    for name in manifest.files:
        if not PLAIN_NAME.fullmatch(name):
            raise FolderError(f"{name!r} is not the name of a file in the folder", where=where, fix=DAMAGED)
    return manifest


def _sealed(text: bytes, where: str) -> bool:
    """Whether the digest is that of the text as it stands, fields of other versions included."""
    everything = decoded(text, dict[str, Any], where)
    stored, everything["digest"] = everything.get("digest"), ""
    return stored == sha256(msgspec.json.encode(everything))


def decoded(text: bytes, kind: type[T], where: str) -> T:
    """JSON as a value of that kind; too deep, too large a number or not UTF-8 is damage like any other."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FolderError(f"plan.json is damaged: {told(error)}", where=where, fix=DAMAGED) from error
