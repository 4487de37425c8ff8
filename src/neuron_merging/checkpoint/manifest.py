"""Read and write the JSON files of a folder: the manifest (plan.json) with all checksums, and figures.json."""

from __future__ import annotations

import hmac
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

import neuron_merging
from neuron_merging.errors import FolderError, MergingError, describe_error
from neuron_merging.evaluation.figures import Figures
from neuron_merging.graph.digests import compute_file_sha256, compute_sha256
from neuron_merging.pruning.plan import PLAN_VERSION, Plan
from neuron_merging.selection.budget import LossCurve

MANIFEST_VERSION = 2
"""Format of a folder. A reader refuses a larger number."""
PLAIN_VERSION = 1
"""Format of a folder without buffers.safetensors and without subfolders, which older versions read too."""
WEIGHTS_FILE, PLAN_FILE, RECIPE_FILE, CARD_FILE = "model.safetensors", "plan.json", "recipe.yaml", "README.md"
REPORT_FILE, INPUTS_FILE, FIGURES_FILE = "report.html", "inputs.safetensors", "figures.json"
BUFFERS_FILE = "buffers.safetensors"
"""Buffers that a state dict leaves out. They lie apart from the weights: transformers would not expect them there."""

MAX_PLAN_BYTES, MAX_TEXT_BYTES = 1 << 28, 1 << 24
"""Largest plan.json or figures.json, and largest other text, in bytes: a larger file could fill the memory."""
FILE_NAME_PATTERN = re.compile(r"(\w[\w.-]{0,99}/)?\w[\w.-]{0,99}")
"""Names that a manifest may list: in the folder or one level below it. None begins with a dot or a separator, so that
no name leads out of the folder."""
FIGURES_VERSION = 1
"""Format of figures.json. A reader refuses a larger number."""
IMAGE_ADDRESS = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]*=*")
"""Pictures must be inline: an address from an untrusted file could make the page load anything."""
FIX_DAMAGED = "Take it from its source again."
T = TypeVar("T")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of plan.json: the plan, the checksums of the other files, and facts about the weights.

    `shared` maps each alias of a tensor to the name under which it is stored. `transient` names the buffers that a
    state dict leaves out (non-persistent). `digest` is the checksum of the manifest itself.
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
        """Return the manifest with its digest, which is computed over the manifest with an empty digest."""
        bare = msgspec.structs.replace(self, digest="")
        return msgspec.structs.replace(self, digest=compute_sha256(msgspec.json.encode(bare)))


class _VersionField(msgspec.Struct):
    version: int


class _ManifestHeader(_VersionField):
    plan: _VersionField


def get_package_versions() -> dict[str, str]:
    """Return the versions that a folder records, for bug reports."""
    return {"neuron-merging": neuron_merging.__version__, "torch": str(torch.__version__)}


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest with its digest as the text of plan.json."""
    return msgspec.json.format(msgspec.json.encode(manifest.with_digest()), indent=1)


# Reading: the folder may come from an untrusted source


def read_manifest(place: Path) -> Manifest:
    """Read and check the manifest of a folder."""
    return parse_manifest(_read_limited(place / PLAN_FILE, MAX_PLAN_BYTES), str(place / PLAN_FILE))


def read_plan_bytes(file: Path) -> bytes:
    """Read the text of a plan.json, or of a file with only a plan."""
    try:
        return _read_limited(file, MAX_PLAN_BYTES)
    except FolderError as error:
        raise FolderError(f"no plan: {error.what}", where=str(file), fix="Give a folder or plan.json.") from error


def read_checked_files(place: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, bytes]:
    """Read small files of a folder, each checked against its checksum."""
    # The figures hold pictures.
    limits = {FIGURES_FILE: MAX_PLAN_BYTES}
    texts = {name: _read_limited(place / name, limits.get(name, MAX_TEXT_BYTES)) for name in names}
    for name, text in texts.items():
        _verify_checksum(place, name, compute_sha256(text), manifest)
    return texts


def verify_checksums(place: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise FolderError if a file was changed. Files of any size are hashed in pieces."""
    for name in names:
        _check_regular_file(place / name)
        _verify_checksum(place, name, compute_file_sha256(place / name), manifest)


def _verify_checksum(place: Path, name: str, found: str, manifest: Manifest) -> None:
    if found != manifest.files.get(name):
        raise FolderError(
            "the file was changed or cut short: its sha256 is not the one in plan.json",
            where=str(place / name),
            fix="Take the folder from its source again.",
        )


def _read_limited(file: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes; raise FolderError if it is larger."""
    _check_regular_file(file)
    try:
        with open(file, "rb") as stream:
            data = stream.read(limit + 1)  # one byte more shows that the file is too large
    except OSError as error:
        raise _make_unreadable_error(file, error.strerror) from error
    if len(data) > limit:
        raise FolderError(f"the file is larger than {limit:,} bytes", where=str(file), fix=FIX_DAMAGED)
    return data


def _check_regular_file(file: Path) -> None:
    """Refuse a pipe or a device: reading it could block forever."""
    try:
        kind = file.stat().st_mode
    except OSError as error:
        raise _make_unreadable_error(file, error.strerror) from error
    if not stat.S_ISREG(kind):
        raise _make_unreadable_error(file, "Is a directory" if stat.S_ISDIR(kind) else "It is not an ordinary file")


def _make_unreadable_error(file: Path, why: str | None) -> FolderError:
    fix = "Give a complete folder that neuron-merging wrote."
    if file.name == PLAN_FILE and file.with_name("config.json").is_file():
        fix = f"If this is a folder of transformers, write hf:{file.parent}"
    return FolderError(f"the file cannot be read: {why}", where=str(file), fix=fix)


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Parse and check a manifest: its versions first, then its types, its digest and its file names."""
    header = decode_json(text, _ManifestHeader, where)
    for name, found, known in (
        ("folder", header.version, MANIFEST_VERSION),
        ("plan", header.plan.version, PLAN_VERSION),
    ):
        if found > known:
            raise FolderError(
                f"the {name} has format {found}, this neuron-merging reads up to {known}",
                where=where,
                fix="Install a newer neuron-merging.",
            )
    manifest = decode_json(text, Manifest, where)
    if not _has_valid_digest(text, where):
        raise FolderError("plan.json was changed by hand", where=where, fix="Take the folder from its source again.")
    for name in manifest.files:
        if not FILE_NAME_PATTERN.fullmatch(name):
            raise FolderError(f"{name!r} is not the name of a file in the folder", where=where, fix=FIX_DAMAGED)
    return manifest


def _has_valid_digest(text: bytes, where: str) -> bool:
    """Whether the digest fits the text, including fields that this version does not know."""
    everything = decode_json(text, dict[str, Any], where)
    stored, everything["digest"] = everything.get("digest"), ""
    return stored == compute_sha256(msgspec.json.encode(everything))


def decode_json(text: bytes, kind: type[T], where: str) -> T:
    """Decode JSON as a type; raise FolderError for any damage, such as deep nesting, huge numbers or invalid UTF-8."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FolderError(f"plan.json is damaged: {describe_error(error)}", where=where, fix=FIX_DAMAGED) from error


# figures.json: what the page and the card show, so that `report` does not measure again


class StoredFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The content of figures.json.

    `curves` are the losses that the search for a budget measured, by group. `sweep` is the sweep whose best result
    this is, as plain values. The settings are in recipe.yaml.
    """

    version: int = FIGURES_VERSION
    title: str
    figures: Figures
    notes: tuple[str, ...] = ()
    curves: dict[str, LossCurve] = {}
    sweep: dict[str, Any] | None = None


def encode_figures(stored: StoredFigures) -> bytes:
    """Encode figures as the text of figures.json."""
    return msgspec.json.encode(_name_nonfinite(msgspec.to_builtins(stored, str_keys=True)))


def _name_nonfinite(value: Any) -> Any:
    """Replace infinities and NaN by texts: JSON cannot represent them as numbers."""
    if isinstance(value, dict):
        return {key: _name_nonfinite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_name_nonfinite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode_figures(text: bytes, where: str) -> StoredFigures:
    """Decode figures.json from an untrusted source: the type of every value is checked."""
    try:
        version = msgspec.json.decode(text, type=_VersionField).version
        if version > FIGURES_VERSION:
            raise FolderError(
                f"the figures have format {version}, this neuron-merging reads up to {FIGURES_VERSION}",
                where=where,
                fix="Install a newer neuron-merging.",
            )
        # Not strict, because infinities and NaN are stored as texts.
        stored = msgspec.convert(msgspec.json.decode(text), StoredFigures, strict=False, str_keys=True)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FolderError(f"the figures are damaged: {describe_error(error)}", where=where, fix=FIX_DAMAGED) from error
    for address in _iterate_image_addresses(stored.figures):
        if not IMAGE_ADDRESS.fullmatch(address):
            raise FolderError("a picture is not stored in the file itself", where=where, fix=FIX_DAMAGED)
    return stored


def _iterate_image_addresses(figures: Figures) -> Iterator[str]:
    yield from figures.inputs
    yield from (layer.heat.image for layer in figures.layers if layer.heat is not None)


SIGNATURE_FILE = ".neuron-merging-signature"
KEY_FILE, KEY_BYTES = "signing-key", 32
FORBIDDEN_KEY_MODES = stat.S_IRWXG | stat.S_IRWXO
"""A key that others can read or write is not used: they could sign with it."""


def get_config_folder() -> Path:
    """Return the user's config folder of this package: in $XDG_CONFIG_HOME, %APPDATA% or ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.environ.get("APPDATA") or "~/.config"
    return Path(home).expanduser() / "neuron-merging"


def sign_plan(text: bytes) -> bytes | None:
    """Return the signature of a plan.json with the user's key, which is made if there is none; None without a key."""
    key = _read_key() or _create_key()
    return None if key is None else _compute_signature(key, text)


def is_signed_by_user(folder: str | Path) -> bool:
    """Whether this user wrote the folder, and plan and recipe are still the same."""
    place, key = Path(folder), _read_key()
    if key is None:
        return False
    try:
        # The signature covers plan.json, and plan.json the checksum of the recipe that names the code.
        text, found = (place / PLAN_FILE).read_bytes(), (place / SIGNATURE_FILE).read_bytes()
        read_checked_files(place, read_manifest(place), (RECIPE_FILE,))
    except (OSError, MergingError):
        return False
    # In constant time, so that a signature cannot be guessed byte by byte.
    return hmac.compare_digest(found, _compute_signature(key, text))


def _compute_signature(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, "sha256").hexdigest().encode()


def _read_key() -> bytes | None:
    """Read the key; None if there is none, or if it is not this user's alone."""
    file = get_config_folder() / KEY_FILE
    try:
        found, key = file.stat(), file.read_bytes()
    except OSError:
        return None
    if os.name != "nt" and (found.st_uid != os.getuid() or found.st_mode & FORBIDDEN_KEY_MODES):
        return None
    return key if len(key) == KEY_BYTES else None


def _create_key() -> bytes | None:
    """Create the key; None if that is not possible, or if there is one that cannot be used."""
    file = get_config_folder() / KEY_FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # O_EXCL: of two processes, one creates the key, and the other reads it.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return _read_key()
    key = secrets.token_bytes(KEY_BYTES)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(key)
    return key
