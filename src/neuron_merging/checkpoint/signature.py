"""Remember which folders this user wrote: they need no consent to import the code that they name.

A random key in the user's config folder signs plan.json, which holds the checksums of the other files. A folder of
someone else, or one that was changed, has no valid signature.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from neuron_merging.checkpoint.manifest import PLAN_FILE, RECIPE_FILE, read_checked_files, read_manifest
from neuron_merging.errors import MergingError

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
