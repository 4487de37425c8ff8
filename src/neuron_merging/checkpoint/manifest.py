"""The manifest of a folder: plan.json, with the checksums of the other files."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

import neuron_merging
from neuron_merging.errors import FolderError, describe_error
from neuron_merging.graph.digests import compute_file_sha256, compute_sha256
from neuron_merging.pruning.plan import PLAN_VERSION, Plan

MANIFEST_VERSION = 1
WEIGHTS_FILE, PLAN_FILE, RECIPE_FILE, CARD_FILE = "model.safetensors", "plan.json", "recipe.yaml", "README.md"
REPORT_FILE, INPUTS_FILE, FIGURES_FILE = "report.html", "inputs.safetensors", "figures.json"

MAX_PLAN_BYTES, MAX_TEXT_BYTES = 1 << 28, 1 << 24
"""The largest plan.json or figures.json and the largest other text, in bytes, that is read."""
FILE_NAME_PATTERN = re.compile(r"\w[\w.-]{0,99}")
FIX_DAMAGED = "Take it from its source again."
T = TypeVar("T")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What plan.json holds: the plan, and what is needed to trust and to understand the rest.

    `shared` maps every further name of a tensor to the name that it is stored under. `transient`
    names the buffers that a state dict leaves out. `digest` covers the manifest itself.
    """

    version: int = MANIFEST_VERSION
    plan: Plan
    files: dict[str, str]
    shared: dict[str, str]
    transient: tuple[str, ...]
    parameters: tuple[int, int]
    macs: tuple[int, int]
    accuracy: tuple[float, float] | None
    versions: dict[str, str]
    digest: str = ""

    def with_digest(self) -> Manifest:
        """The same with its digest."""
        bare = msgspec.structs.replace(self, digest="")
        return msgspec.structs.replace(self, digest=compute_sha256(msgspec.json.encode(bare)))


class _VersionField(msgspec.Struct):
    version: int


class _ManifestHeader(_VersionField):
    plan: _VersionField


def get_package_versions() -> dict[str, str]:
    return {"neuron-merging": neuron_merging.__version__, "torch": str(torch.__version__)}


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest.with_digest()), indent=1)


# Reading, as data from a stranger


def read_manifest(place: Path) -> Manifest:
    """The manifest of a folder."""
    return parse_manifest(_read_limited(place / PLAN_FILE, MAX_PLAN_BYTES), str(place / PLAN_FILE))


def read_plan_bytes(file: Path) -> bytes:
    """A plan.json, or a plan in a file of its own."""
    try:
        return _read_limited(file, MAX_PLAN_BYTES)
    except FolderError as error:
        raise FolderError(f"no plan: {error.what}", where=str(file), fix="Give a folder or plan.json.") from error


def read_checked_files(place: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, bytes]:
    """Small files of a folder, each checked against its sum."""
    limits = {FIGURES_FILE: MAX_PLAN_BYTES}
    texts = {name: _read_limited(place / name, limits.get(name, MAX_TEXT_BYTES)) for name in names}
    for name, text in texts.items():
        _verify_checksum(place / name, compute_sha256(text), manifest)
    return texts


def verify_checksums(place: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Refuse a folder in which a file was changed; files of any size, for they are read piece by piece."""
    for name in names:
        _check_regular_file(place / name)
        _verify_checksum(place / name, compute_file_sha256(place / name), manifest)


def _verify_checksum(file: Path, found: str, manifest: Manifest) -> None:
    if found != manifest.files.get(file.name):
        raise FolderError(
            "the file was changed or cut short: its sha256 is not the one in plan.json",
            where=str(file),
            fix="Take the folder from its source again.",
        )


def _read_limited(file: Path, most: int) -> bytes:
    _check_regular_file(file)
    try:
        with open(file, "rb") as stream:
            data = stream.read(most + 1)
    except OSError as error:
        raise _make_unreadable_error(file, error.strerror) from error
    if len(data) > most:
        raise FolderError(f"the file is larger than {most:,} bytes", where=str(file), fix="No such file is that large.")
    return data


def _check_regular_file(file: Path) -> None:
    """A pipe or a device in a folder would be read for ever."""
    try:
        kind = file.stat().st_mode
    except OSError as error:
        raise _make_unreadable_error(file, error.strerror) from error
    if not stat.S_ISREG(kind):
        raise _make_unreadable_error(file, "Is a directory" if stat.S_ISDIR(kind) else "It is not an ordinary file")


def _make_unreadable_error(file: Path, why: str | None) -> FolderError:
    fix = "Give a folder that neuron-merging wrote, whole."
    return FolderError(f"the file cannot be read: {why}", where=str(file), fix=fix)


def parse_manifest(text: bytes, where: str) -> Manifest:
    """The manifest in a text, every value of it checked."""
    header = decode_json(text, _ManifestHeader, where)
    for name, found, known in (
        ("folder", header.version, MANIFEST_VERSION),
        ("plan", header.plan.version, PLAN_VERSION),
    ):
        if found > known:
            raise FolderError(
                f"the {name} has format {found}, this neuron-merging reads up to {known}",
                where=where,
                fix="Update neuron-merging: pip install -U neuron-merging.",
            )
    manifest = decode_json(text, Manifest, where)
    if not _has_valid_digest(text, where):
        raise FolderError("plan.json was changed by hand", where=where, fix="Take the folder from its source again.")
    for name in manifest.files:
        if not FILE_NAME_PATTERN.fullmatch(name):
            raise FolderError(f"{name!r} is not the name of a file in the folder", where=where, fix=FIX_DAMAGED)
    return manifest


def _has_valid_digest(text: bytes, where: str) -> bool:
    """Whether the digest is that of the text as it stands, fields of other versions included."""
    everything = decode_json(text, dict[str, Any], where)
    stored, everything["digest"] = everything.get("digest"), ""
    return stored == compute_sha256(msgspec.json.encode(everything))


def decode_json(text: bytes, kind: type[T], where: str) -> T:
    """JSON as a value of that kind; too deep, too large a number or not UTF-8 is damage like any other."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FolderError(f"plan.json is damaged: {describe_error(error)}", where=where, fix=FIX_DAMAGED) from error
