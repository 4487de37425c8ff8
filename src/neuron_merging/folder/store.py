"""store: a compressed network as a folder that explains itself, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor, nn

from neuron_merging import atomic
from neuron_merging.cutting.plan import Plan
from neuron_merging.cutting.surgery import apply_plan
from neuron_merging.errors import FolderError, MergingError
from neuron_merging.folder import recipe as recipes
from neuron_merging.folder.card import card
from neuron_merging.folder.manifest import (
    CARD,
    PAGE,
    PLAN,
    RECIPE,
    WEIGHTS,
    Manifest,
    manifest_text,
    parse_manifest,
    read_files,
    sha256,
    versions,
)
from neuron_merging.folder.recipe import Recipe
from neuron_merging.measuring.summary import Summary
from neuron_merging.mergers.interface import Merged
from neuron_merging.networks import sources
from neuron_merging.networks.weights import fit


@dataclass(frozen=True)
class Compressed:
    """The smaller network, the plan that rebuilds it, and the summary.

    Attributes
    ----------
    model
        The smaller network, a plain module of the original's class.
    plan
        What was kept where.
    summary
        Before and after, group by group, and what was refused and why; printed, a text for people.
    merged
        The merges themselves, for the report; empty where a network was read back from a folder.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> small = nm.compress(net, torch.zeros(1, 4), ratio=0.5)
    >>> small.summary.parameters
    (58, 30)
    """

    model: nn.Module
    plan: Plan
    summary: Summary
    merged: Merged = field(default=Merged(()), repr=False)

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write the folder that `load` reads: weights, plan, recipe and card.

        Parameters
        ----------
        folder
            Where to. It is written whole or not at all.
        overwrite
            Whether a folder that was written here may be replaced.

        Raises
        ------
        MergingError
            Something is there already.

        Examples
        --------
        >>> import tempfile, neuron_merging as nm
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     nm.compress(net, torch.zeros(1, 4)).save(f"{place}/small")
        """
        save(self, folder, overwrite=overwrite)


def save(
    compressed: Compressed,
    folder: str | Path,
    *,
    recipe: Recipe | None = None,
    accuracy: tuple[float, float] | None = None,
    overwrite: bool = False,
    page: str | None = None,
) -> None:
    """Write a compressed network as a folder that explains itself.

    Parameters
    ----------
    compressed
        What `compress` returned.
    folder
        Where to. It is written whole or not at all.
    recipe
        The settings, where a recipe made it: `load` then knows the network.
    accuracy
        Before and after in percent, for the card.
    overwrite
        Whether a folder that was written here may be replaced.
    page
        The report, to be put beside the rest.

    Raises
    ------
    MergingError
        Something is there already.
    FolderError
        The network has a state that is not made of tensors.
    OSError
        The disk is full or not writable; what was there is as it was.

    Examples
    --------
    >>> import tempfile, neuron_merging as nm
    >>> build = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> small = nm.compress(build(), torch.zeros(1, 4), ratio=0.5)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     save(small, f"{place}/small")
    ...     print(sorted(os.listdir(f"{place}/small")))
    ['README.md', 'model.safetensors', 'plan.json', 'recipe.yaml']
    """
    place = Path(os.path.realpath(folder))
    check_target(place, overwrite)
    files = _contents(compressed, recipe, accuracy)
    if page is not None:
        files[PAGE] = page.encode()
    place.parent.mkdir(parents=True, exist_ok=True)
    with atomic.locked(place):
        atomic.recover(place)
        check_target(place, overwrite)
        atomic.publish(place, files)


def save_tuned(
    source: str | Path,
    model: nn.Module,
    folder: str | Path,
    *,
    accuracy: tuple[float, float],
    data: str,
    more: Mapping[str, bytes],
) -> None:
    """The folder `source` once more, for the same network after training: same plan and recipe, new weights.

    `accuracy` is in percent on `data`, before and after the training; `more` are further files. They are
    written into `folder`, the plan last: without it, it is no folder of a network yet.
    """
    manifest, kept = read(source, (RECIPE, CARD))
    tensors, shared, transient = _tensors(model)
    note = f"\n## Fine-tuned\n\nAccuracy on {data}: {accuracy[0]:.2f} % before, {accuracy[1]:.2f} % after.\n"
    files = {WEIGHTS: safetensors.torch.save(tensors), RECIPE: kept[RECIPE], CARD: kept[CARD] + note.encode(), **more}
    tuned = msgspec.structs.replace(
        manifest,
        files={name: sha256(data) for name, data in files.items()},
        shared=shared,
        transient=transient,
        accuracy=None,  # the original's is known on other images, if at all
        versions=versions(),
    )
    place = Path(os.path.realpath(folder))
    for name, content in files.items():
        atomic.replace_file(place / name, content)
    atomic.replace_file(place / PLAN, manifest_text(tuned))


def put_page(folder: str | Path, page: str) -> Path:
    """Give a folder its page, in place of the one that it may have; its path."""
    place = Path(os.path.realpath(folder))
    with atomic.locked(place):
        atomic.recover(place)
        read_files(place, ())
        return atomic.replace_file(place / PAGE, page.encode())


def check_target(folder: str | Path, overwrite: bool) -> None:
    """Refuse a place that may not be written to, before any work is done."""
    place = Path(os.path.realpath(folder))
    atomic.check_writable(place)
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not (place / PLAN).is_file():
        raise MergingError("something else is there", where=str(folder), fix="Give another place for the result.")
    if not overwrite:
        raise MergingError("the folder exists", where=str(folder), fix="Give another one, or --overwrite.")


def load(folder: str | Path, *, build: Callable[[], nn.Module] | None = None) -> nn.Module:
    """The compressed network in evaluation mode, from a folder that `save` wrote. No pickle is read.

    Parameters
    ----------
    folder
        What `save`, or the command line, wrote.
    build
        Makes a fresh network of the original class; its weights do not matter. Without it the recipe's MODEL is
        built, which imports and calls the code of that name: for a folder that you do not trust, give `build`.

    Returns
    -------
    nn.Module
        The network, with exactly the stored tensors.

    Raises
    ------
    FolderError
        The folder is missing, damaged, changed or too new, or names no network that can be built.
    ModelError
        What `build` makes does not have the stored tensors.
    MergingError
        `build` is no function, or makes a network that the plan does not fit.

    Examples
    --------
    >>> import tempfile, neuron_merging as nm
    >>> build = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     nm.compress(build(), torch.zeros(1, 4), ratio=0.5).save(f"{place}/small")
    ...     print(load(f"{place}/small", build=build)[0])
    Linear(in_features=4, out_features=4, bias=True)
    """
    manifest, files = read(folder)
    fresh = _fresh(build) if build is not None else _builder(folder, files[RECIPE])()
    _tie(fresh, manifest.shared)
    small = apply_plan(fresh, manifest.plan)
    _fill(small, safetensors.torch.load(files[WEIGHTS]), manifest, str(folder))
    _tie(small, manifest.shared)
    return small.eval()


def read(folder: str | Path, names: tuple[str, ...] = (WEIGHTS, RECIPE)) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the named files, each checked against its sum."""
    place = Path(os.path.realpath(folder))
    old = atomic.sibling(place, "old")
    while True:
        before = atomic.identity(place)
        if before is None and old.exists():
            with atomic.locked(place):
                atomic.recover(place)
        try:
            return read_files(place, names)
        except FolderError:
            moved = atomic.identity(place) != before or (before is None and old.exists())
            if not moved:  # else a writer was at work: look again
                raise


def read_plan(path: str | Path) -> Plan:
    """The plan in a folder, in its plan.json, or in a file of its own."""
    file = Path(path)
    if file.is_dir():
        return read(file, ())[0].plan
    try:
        text = file.read_bytes()
    except OSError as error:
        raise FolderError(f"no plan: {error.strerror}", where=str(path), fix="Give a folder or plan.json.") from error
    try:
        bare = "plan" not in msgspec.json.decode(text, type=dict)
    except msgspec.MsgspecError:
        bare = False
    return Plan.from_json(text) if bare else parse_manifest(text, str(path)).plan


def recipe_of(folder: str | Path) -> Recipe:
    """The recipe that a folder was made with."""
    text = read(folder, (RECIPE,))[1][RECIPE].decode()
    return recipes.from_mapping(recipes.parse(text, RECIPE), RECIPE)


def _contents(compressed: Compressed, recipe: Recipe | None, accuracy: tuple[float, float] | None) -> dict[str, bytes]:
    """Every file of the folder; plan.json comes last and has the sums of the others."""
    tensors, shared, transient = _tensors(compressed.model)
    files = {
        WEIGHTS: safetensors.torch.save(tensors),
        RECIPE: (
            recipe.to_yaml() if recipe else "# compressed from Python: give load() the network with build=\n"
        ).encode(),
        CARD: card(type(compressed.model).__name__, compressed.summary, recipe, accuracy).encode(),
    }
    manifest = Manifest(
        plan=compressed.plan,
        files={name: sha256(data) for name, data in files.items()},
        shared=shared,
        transient=transient,
        parameters=compressed.summary.parameters,
        macs=compressed.summary.macs,
        accuracy=accuracy,
        versions=versions(),
    )
    return {**files, PLAN: manifest_text(manifest)}


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """Each tensor once; further names of the same tensor; buffers that a state dict leaves out."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise FolderError(
                f"the state has a {type(value).__name__}, not a tensor",
                where=name,
                fix="get_extra_state() cannot be kept without pickle: make it a buffer.",
            )
    transient = {k: v for k, v in model.named_buffers(remove_duplicate=False) if k not in state}
    first: dict[int, str] = {}
    shared = {}
    for name, value in (state | transient).items():
        if first.setdefault(id(value), name) != name:
            shared[name] = first[id(value)]
    owned = {k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in (state | transient).items()}
    return {k: v for k, v in owned.items() if k not in shared}, shared, tuple(transient)


def _fresh(build: Callable[[], nn.Module]) -> nn.Module:
    """What the user's function makes: its own errors are the user's to see."""
    if isinstance(build, nn.Module) or not callable(build):
        what = f"build is a {type(build).__name__}, not a function"
        raise MergingError(what, where="build=", fix="Give a function, as build=lambda: MyNetwork().")
    made = build()
    if not isinstance(made, nn.Module):
        what = f"build returned a {type(made).__name__}, not a network"
        raise MergingError(what, where="build=", fix="Return a fresh network of the original class.")
    return made


def _builder(folder: str | Path, text: bytes) -> Callable[[], nn.Module]:
    recipe = recipes.from_mapping(recipes.parse(text.decode(), RECIPE), RECIPE)
    if recipe.model is None or not sources.rebuildable(recipe.model):
        raise FolderError(
            f"the recipe names no network that can be built ({recipe.model or 'it was compressed from Python'})",
            where=str(folder),
            fix="Give load(..., build=) a function, or --model its name, for a fresh network of the original class.",
        )
    return lambda: build_network(recipe.model or "", recipe.arg)


def build_network(model: str, arg: Mapping[str, Any], *, fresh: bool = True) -> nn.Module:
    """The network that MODEL names, which may be a folder; `fresh` does without weights that would be fetched."""
    return load(model) if os.path.isdir(model) else sources.build(model, arg, fresh=fresh)


def _tie(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Names that were one tensor become one tensor again."""
    known = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, home in shared.items():
        if name in known and home in known and known[name] is not known[home]:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, known[home])


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], manifest: Manifest, where: str) -> None:
    """Give the network exactly the stored tensors, in their own precision."""
    state = {name: tensor.clone() for name, tensor in tensors.items()}
    state |= {name: state[home] for name, home in manifest.shared.items()}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in manifest.transient:
        value = state.pop(name)
        if name in buffers:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, value)
    fit(model, state, where, assign=True)
