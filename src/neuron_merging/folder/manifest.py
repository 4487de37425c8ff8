"""The manifest of a folder: plan.json, with the sums of the other files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch

import neuron_merging
from neuron_merging.cutting.plan import Plan
from neuron_merging.errors import FolderError

VERSION = 1


WEIGHTS, PLAN, RECIPE, CARD = "model.safetensors", "plan.json", "recipe.yaml", "README.md"


PAGE = "report.html"


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


class _Header(msgspec.Struct):
    version: int


def versions() -> dict[str, str]:
    return {"neuron-merging": neuron_merging.__version__, "torch": str(torch.__version__)}


def manifest_text(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest.sealed()), indent=1)


def read_files(place: Path, names: tuple[str, ...]) -> tuple[Manifest, dict[str, bytes]]:
    manifest = parse_manifest(_bytes(place / PLAN), str(place / PLAN))
    files = {}
    for name in names or ():
        files[name] = _bytes(place / name)
        if sha256(files[name]) != manifest.files.get(name):
            raise FolderError(
                "the file was changed or cut short: its sha256 is not the one in plan.json",
                where=str(place / name),
                fix="Take the folder from its source again.",
            )
    return manifest, files


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise FolderError(
            f"the file cannot be read: {error.strerror}",
            where=str(file),
            fix="Give a folder that neuron-merging wrote, whole.",
        ) from error


def parse_manifest(text: bytes, where: str) -> Manifest:
    try:
        version = msgspec.json.decode(text, type=_Header).version
        if version > VERSION:
            raise FolderError(
                f"the folder has format {version}, this neuron-merging reads up to {VERSION}",
                where=where,
                fix="Update neuron-merging: pip install -U neuron-merging.",
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        raise FolderError(
            f"plan.json is damaged: {error}", where=where, fix="Take it from its source again."
        ) from error
    if manifest.sealed() != manifest:
        raise FolderError("plan.json was changed by hand", where=where, fix="Take the folder from its source again.")
    return manifest


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
