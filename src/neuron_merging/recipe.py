"""recipe: every choice of `compress` as one value that goes to YAML and back."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from neuron_merging.errors import MergingError

if TYPE_CHECKING:
    from neuron_merging.criteria import Criterion
    from neuron_merging.data import FolderImages, Images
    from neuron_merging.mergers import Merger
    from neuron_merging.pipeline import Settings

HOW_IT_RAN = ("report", "dry_run", "json", "overwrite")
"""Keys that say how the command ran, not what it made: they are read but not saved."""


class RecipeError(MergingError):
    """A recipe that cannot be meant: an unknown key or a value of the wrong kind."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What `neuron-merging compress` was asked for; each field is a flag of the same name."""

    model: str | None = None
    weights: str | None = None
    input: list[str] = []
    arg: dict[str, Any] = {}
    ratio: float = 0.5
    layer: dict[str, float] = {}
    ignore: list[str] = []
    scope: str = "internal"
    criterion: str = "l2"
    merger: str | None = None
    round_to: int = 1
    seed: int = 0
    calibrate: str | None = None
    calibrate_images: int = 512
    eval: str | None = None
    report: bool = True
    dry_run: bool = False
    json: bool = False
    overwrite: bool = False

    def to_yaml(self) -> str:
        """All keys that describe the result, defaults included.

        >>> from_mapping(yaml.safe_load(Recipe(ratio=0.3).to_yaml())).ratio
        0.3
        """
        kept = {key: value for key, value in msgspec.structs.asdict(self).items() if key not in HOW_IT_RAN}
        return str(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))

    def anywhere(self) -> Recipe:
        """The same with paths that hold from any folder."""
        paths = {key: _absolute(getattr(self, key)) for key in ("model", "weights")}
        data = {key: _absolute_data(getattr(self, key)) for key in ("calibrate", "eval")}
        return msgspec.structs.replace(self, **paths, **data)

    def settings(self) -> Settings:
        """The settings of the library, checked; calibration data is read here."""
        from neuron_merging.pipeline import Settings

        ratio = {"*": self.ratio, **self.layer} if self.layer else self.ratio
        found = Settings(
            ratio, self._criterion(), self._merger(), self.scope, tuple(self.ignore), self.round_to, self.seed
        )
        found.check()
        return found

    def _criterion(self) -> str | Criterion:
        """`NAME`, or `package.module:function`."""
        module, _, name = self.criterion.partition(":")
        found: str | Criterion = _own(module, name, "criterion") if name else self.criterion
        return found

    def _merger(self) -> Merger | None:
        """The merger that is named; with data, the one that uses it."""
        text = self.merger or ("calibrated" if self.calibrate else "")
        if not text:
            return None
        name, kind, options = _named(text)
        if (name == "calibrated") != (self.calibrate is not None):
            raise RecipeError(
                f"merger {name!r} " + ("has no data" if self.calibrate is None else "uses no data"),
                where="merger, calibrate",
                fix="The merger calibrated and --calibrate DATA go together.",
            )
        return _configured(kind, options, [self._calibration()] if self.calibrate else [])

    def _calibration(self) -> list[Any]:
        """Images from all of the data set, at equal distances."""
        text = self.calibrate or ""
        images = open_data(text, "test" if text.partition(":")[0] == "imagenet" else "train")
        step = max(1, len(images) // self.calibrate_images)
        left, found = self.calibrate_images, []
        for x, _ in images.batches(128 * step):
            found.append(x[::step][:left])
            left -= len(found[-1])
            if not left:
                break
        return found


def check_merger(text: str) -> None:
    """Refuse a merger or an option that does not exist, without reading data."""
    name, kind, options = _named(text)
    _configured(kind, options, [[]] if name == "calibrated" else [])


def _named(text: str) -> tuple[str, Any, dict[str, Any]]:
    """Name, class and options of `NAME` or `package.module:Class`, either with `:option=value,…`."""
    from neuron_merging import mergers

    kinds: dict[str, Any] = {**mergers.MERGERS, "calibrated": mergers.Calibrated}
    name, _, rest = text.partition(":")
    if name not in kinds and rest and "=" not in rest.partition(":")[0]:
        own, _, rest = rest.partition(":")
        kinds[name] = _own(name, own, "merger")
    if name not in kinds:
        raise RecipeError(f"unknown merger {name!r}", where="merger", fix=nearest(name, kinds))
    return name, kinds[name], pairs(rest.split(",") if rest else [], "--merger") or {}


def _own(module: str, name: str, where: str) -> Any:
    """A class or function of the user's."""
    from neuron_merging import models

    try:
        return models.imported(module, name, where)
    except MergingError as error:
        raise RecipeError(error.what, where=error.where, fix=error.fix) from error


def _absolute(path: str | None) -> str | None:
    return os.path.abspath(path) if path and os.path.exists(path) else path


def _absolute_data(text: str | None) -> str | None:
    name, colon, path = (text or "").partition(":")
    return f"{name}:{os.path.abspath(os.path.expanduser(path))}" if colon else text


def _configured(kind: Any, options: dict[str, Any], first: list[Any]) -> Merger:
    """A merger with options, each checked against the kind of its field."""
    kinds = {k: v for k, v in get_type_hints(kind).items() if k != "batches"}
    for key in options:
        if key not in kinds:
            raise RecipeError(f"unknown option {key!r}", where=f"merger.{key}", fix=nearest(key, kinds))
    chosen = {k: _checked(v, kinds[k], "", f"merger.{k}") for k, v in options.items()}
    try:
        merger: Merger = kind(*first, **chosen)
    except TypeError as error:
        raise RecipeError(f"the merger cannot be made: {error}", where="merger", fix="Give it its options.") from error
    return merger


def open_data(text: str, split: Literal["train", "test"], *, download: bool = False) -> Images | FolderImages:
    """The data set of `NAME` or `NAME:PATH`, where PATH is a folder or a file in it."""
    from neuron_merging import data

    name, _, path = text.partition(":")
    if name == "digits":
        return data.digits(split)
    root = Path(path).expanduser() if path else None
    return data.load(name, split, root.parent if root and root.is_file() else root, download=download)


def resolve(file: str | Path | None, flags: Mapping[str, Any]) -> Recipe:
    """The recipe of a file, if any; flags that were given (are not None) win over its keys."""
    keys = read(file) if file is not None else {}
    return from_mapping({**keys, **{k: v for k, v in flags.items() if v is not None}}, str(file or ""))


def read(file: str | Path) -> dict[str, Any]:
    """The keys of a YAML file."""
    try:
        return parse(Path(file).read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe cannot be read: {error}", fix="Give a YAML file.") from error


def parse(text: str, where: str = "recipe") -> dict[str, Any]:
    """The keys of YAML text."""
    keys = _yaml(text, where)
    if not isinstance(keys, dict | None):
        raise RecipeError(f"expected keys and values, got {type(keys).__name__}", where=where, fix="Write ratio: 0.5")
    return keys or {}


def from_mapping(keys: Mapping[Any, Any], where: str = "") -> Recipe:
    """A checked recipe; the error gives the path of the key and the nearest right one."""
    kinds = get_type_hints(Recipe)
    for key in keys:
        if key not in kinds:
            raise RecipeError(f"unknown key {key!r}", where=_at(where, str(key)), fix=nearest(str(key), kinds))
    return Recipe(**{key: _checked(value, kinds[key], where, key) for key, value in keys.items()})


def _checked(value: Any, kind: Any, where: str, path: str) -> Any:
    origin = get_origin(kind)
    if origin is dict and isinstance(value, dict):
        return {_text(k, where, path): _checked(v, get_args(kind)[1], where, f"{path}.{k}") for k, v in value.items()}
    if origin is list and isinstance(value, str):
        return [value]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, inside = str(error).partition(" - at `$")
        fix = f"{path} is {_spelled(kind)}."
        raise RecipeError(f"{what}: {value!r}", where=_at(where, path + inside.rstrip("`")), fix=fix) from error


def _text(key: Any, where: str, path: str) -> str:
    if not isinstance(key, str):
        raise RecipeError(f"{key!r} is not a name", where=_at(where, path), fix="Put it in quotes.")
    return key


def _spelled(kind: Any) -> str:
    names = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
    if get_origin(kind) is list:
        return "a list of texts"
    if get_origin(kind) is dict:
        return "a mapping of names to values"
    return " or ".join(names.get(k, str(k)) for k in (get_args(kind) or (kind,)) if k is not type(None))


def _at(where: str, path: str) -> str:
    return f"{where}: {path}" if where else path


def nearest(word: str, known: Mapping[str, Any]) -> str:
    """The advice for a name that does not exist.

    >>> nearest("raito", {"ratio": 0, "scope": 0})
    'Did you mean ratio?'
    """
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(close)}?" if close else f"Keys: {', '.join(known)}."


def pairs(entries: list[str] | None, flag: str) -> dict[str, Any] | None:
    """`NAME=VALUE` flags as a mapping, values read as YAML.

    >>> pairs(["layer1.*=0.3"], "--layer")
    {'layer1.*': 0.3}
    """
    if entries is None:
        return None
    found = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not name or not equals:
            raise RecipeError(f"{entry!r} is not NAME=VALUE", where=flag, fix=f"Write {flag} 'name=value'.")
        found[name] = _yaml(value, flag)
    return found


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"not YAML: {' '.join(str(error).split())}", where=where, fix="Mend that line.") from error
