"""Load a network from a folder that `save` wrote, or read the texts in it.

Readers hold no lock, because a folder may be read-only. They check that the folder is still the same one after
reading, and read again if a writer replaced it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from neuron_merging import atomic
from neuron_merging.checkpoint import recipe as recipes
from neuron_merging.checkpoint.manifest import (
    BUFFERS_FILE,
    FIGURES_FILE,
    FIX_DAMAGED,
    RECIPE_FILE,
    WEIGHTS_FILE,
    Manifest,
    StoredFigures,
    decode_figures,
    decode_json,
    parse_manifest,
    read_checked_files,
    read_manifest,
    read_plan_bytes,
    verify_checksums,
)
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.checkpoint.recipe_names import check_recipe_trusted
from neuron_merging.errors import FolderError, MergingError
from neuron_merging.graph.copying import (
    copy_without_hooks,
    make_meta_tensor,
    named_tensors_with_aliases,
    unwrap_model,
)
from neuron_merging.models import sources
from neuron_merging.models.state_dicts import load_state_dict_checked, read_safetensors
from neuron_merging.onnx.formats import find_format
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.surgery import apply_plan

T = TypeVar("T")


def load(folder: str | Path, *, build: Callable[[], nn.Module] | None = None, trust: bool = False) -> nn.Module:
    """Load a compressed network in evaluation mode from a folder that `save` wrote.

    Parameters
    ----------
    folder
        A folder that `save` or `neuron-merging compress` wrote. It is not trusted: nothing in it is run as code.
    build
        Returns a fresh network of the original class; its weights do not matter. Without it, the network that the
        recipe names is built, if it is a registered one or comes from timm or torchvision.
    trust
        Whether to import and call any other code that the recipe names, as `package.module:factory`. A folder that
        this user wrote needs no trust.

    Returns
    -------
    nn.Module
        A network of the original class with fewer channels. It does not depend on the folder any more.

    Raises
    ------
    FolderError
        The folder is missing, damaged, changed or too new, or it names code and is not trusted.
    ModelError
        The network from `build` does not have the stored tensors.
    MergingError
        `build` is not a function, or returns a network that the plan does not fit.

    Examples
    --------
    >>> import tempfile, neuron_merging as nm
    >>> build = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     nm.compress(build(), torch.zeros(1, 4), ratio=0.5).save(f"{place}/small")
    ...     print(load(f"{place}/small", build=build)[0])
    Linear(in_features=4, out_features=4, bias=True)
    """
    return _load_folder(folder, build, trust, ())


def _load_folder(
    folder: str | Path, build: Callable[[], nn.Module] | None, trust: bool, above: tuple[Path, ...]
) -> nn.Module:
    """Load a folder. `above` are the folders that are being loaded: each names the next as its original network."""
    place = atomic.resolve_path(folder)
    if place in above:
        what = "the folder's recipe names the folder itself as its origin"
        raise FolderError(what, where=str(folder), fix="Give load(..., build=) a function for a fresh network.")
    tensors = None
    while tensors is None:  # again if a writer replaced the folder between manifest and weights
        manifest, texts = read_folder(folder, optional=(sources.ORIGINAL_CONFIG_FILE,))
        fresh = _build_fresh(folder, texts, build, trust, (*above, place))
        small = _make_empty_network(fresh, manifest)
        del fresh  # before the weights are read: never hold both in memory
        tensors = _read_consistently(place, partial(_read_weights, place, manifest))
    _fill_tensors(small, tensors, manifest, str(folder))
    _tie_shared_tensors(small, manifest.shared)
    return small.eval()


def build_or_load_network(model: str, arg: Mapping[str, Any], *, fresh: bool = True, trust: bool = False) -> nn.Module:
    """Build the network that the user's MODEL names, or load it if MODEL is a folder.

    `fresh` skips weights that would have to be fetched. `trust` is whether code that the folder names may run.
    """
    return load(model, trust=trust) if os.path.isdir(model) else sources.build_from_source(model, arg, fresh=fresh)


# The network before its weights are filled in


def _call_build(build: Callable[[], nn.Module]) -> nn.Module:
    """Call the user's function and check its result; exceptions of the function itself pass through."""
    if isinstance(build, nn.Module) or not callable(build):
        what = f"build is a {type(build).__name__}, not a function"
        raise MergingError(what, where="build=", fix="Give a function, as build=lambda: MyNetwork().")
    network = unwrap_model(build())
    if not isinstance(network, nn.Module):
        what = f"build returned a {type(network).__name__}, not a network"
        raise MergingError(what, where="build=", fix="Return a fresh network of the original class.")
    return network


def _build_fresh(
    folder: str | Path,
    texts: Mapping[str, bytes],
    build: Callable[[], nn.Module] | None,
    trust: bool,
    above: tuple[Path, ...],
) -> nn.Module:
    """Build a network of the original class: by the user's function, from the stored config, or from the recipe."""
    if build is not None:
        return _call_build(build)
    if sources.ORIGINAL_CONFIG_FILE in texts:
        # Without memory: the folder stores every tensor, and a config from a stranger may have any sizes.
        with torch.device("meta"):
            return sources.build_from_config(texts[sources.ORIGINAL_CONFIG_FILE])
    return _build_from_recipe(folder, texts[RECIPE_FILE], trust, above)


def _build_from_recipe(folder: str | Path, text: bytes, trust: bool, above: tuple[Path, ...]) -> nn.Module:
    """Build the network that a folder's recipe names, if that is possible and trusted."""
    recipe = _parse_recipe(folder, text)
    if recipe.model is None or not sources.can_rebuild(recipe.model):
        raise FolderError(
            f"the recipe names no network that can be built ({recipe.model or 'it was compressed from Python'})",
            where=str(folder),
            fix="Give load(..., build=) a function, or --model its name, for a fresh network of the original class.",
        )
    check_recipe_trusted(recipe, folder, trust, keys=("model",))
    # The network that was compressed came from such a folder itself.
    if os.path.isdir(recipe.model):
        return _load_folder(recipe.model, None, trust, above)
    # Registered networks are built without memory; foreign code may not support the meta device.
    with torch.device("meta") if sources.is_registered_network(recipe.model) else nullcontext():
        return sources.build_from_source(recipe.model, recipe.arg, fresh=True)


def _make_empty_network(fresh: nn.Module, manifest: Manifest) -> nn.Module:
    """Build the pruned network with meta tensors in place of those that the folder stores: they take no memory."""
    stored = {*fresh.state_dict(), *manifest.transient}
    meta_tensors = {
        id(tensor): make_meta_tensor(tensor)
        for name, tensor in named_tensors_with_aliases(fresh).items()
        if name in stored
    }
    empty = copy_without_hooks(fresh, meta_tensors)
    _tie_shared_tensors(empty, manifest.shared)  # the plan cuts a shared tensor once
    return apply_plan(empty, manifest.plan)


def _tie_shared_tensors(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Tie tensors that were shared when the network was saved."""
    known = named_tensors_with_aliases(model)
    for name, home in shared.items():
        if name in known and home in known and known[name] is not known[home]:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, known[home])


# Weights


def _read_weights(place: Path, manifest: Manifest) -> dict[str, Tensor] | None:
    """Read the weights that belong to a manifest; None if the folder has another manifest by now."""
    if read_manifest(place) != manifest:
        return None
    # Only what the manifest lists: a file that was added later is not read.
    names = (WEIGHTS_FILE, *(manifest.files.keys() & {BUFFERS_FILE}))
    verify_checksums(place, manifest, names)
    return {key: tensor for name in names for key, tensor in read_safetensors(place / name).items()}


def _fill_tensors(model: nn.Module, tensors: Mapping[str, Tensor], manifest: Manifest, where: str) -> None:
    """Assign the stored tensors to the network, in the precision in which they are stored."""
    homes = {**{name: name for name in tensors}, **manifest.shared}
    for name in {*manifest.shared.values(), *manifest.transient}:
        if homes.get(name) not in tensors:
            raise FolderError(f"{name!r} is not among the weights", where=where, fix=FIX_DAMAGED)
    state = {name: tensors[home] for name, home in homes.items()}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in manifest.transient:  # load_state_dict does not accept non-persistent buffers
        value = state.pop(name)
        if name in buffers:
            _check_buffer_shape(name, buffers[name], value, where)
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, value)
    load_state_dict_checked(model, state, where, assign=True)


def _check_buffer_shape(name: str, known: Tensor, stored: Tensor, where: str) -> None:
    if known.shape != stored.shape:
        what = f"{name} has shape {tuple(stored.shape)}, the network's is {tuple(known.shape)}"
        raise FolderError(f"the weights do not fit the network: {what}", where=where, fix=FIX_DAMAGED)


# Manifest, plan, recipe and figures


def read_folder(
    folder: str | Path, names: tuple[str, ...] = (RECIPE_FILE,), optional: tuple[str, ...] = ()
) -> tuple[Manifest, dict[str, bytes]]:
    """Read the manifest and the named texts, each checked against its checksum; `optional` ones if there are any."""
    place = atomic.resolve_path(folder)
    _check_is_folder(place)

    def read_texts() -> tuple[Manifest, dict[str, bytes]]:
        manifest = read_manifest(place)
        return manifest, read_checked_files(place, manifest, (*names, *(manifest.files.keys() & set(optional))))

    return _read_consistently(place, read_texts)


def read_plan(path: str | Path) -> Plan:
    """Read the plan of a folder, of a plan.json, or of a file with only a plan."""
    file = Path(path)
    if file.is_dir():
        return read_folder(file, ())[0].plan
    if find_format(file) is not None:
        raise FolderError("this is a file of a network, not a plan", where=str(path), fix="Give a folder or plan.json.")
    text = read_plan_bytes(file)
    # A manifest holds its plan under this key; a plan alone has none.
    bare = "plan" not in decode_json(text, dict, str(path))
    return Plan.from_json(text) if bare else parse_manifest(text, str(path)).plan


def read_recipe(folder: str | Path) -> Recipe:
    """Read the recipe that a folder was made with."""
    return _parse_recipe(folder, read_folder(folder)[1][RECIPE_FILE])


def read_figures(folder: str | Path) -> tuple[StoredFigures | None, Recipe]:
    """Read the figures and the recipe of a folder; the figures are None in folders of older versions."""
    _, texts = read_folder(folder, optional=(FIGURES_FILE,))
    file = atomic.resolve_path(folder) / FIGURES_FILE
    figures = decode_figures(texts[FIGURES_FILE], str(file)) if FIGURES_FILE in texts else None
    return figures, _parse_recipe(folder, texts[RECIPE_FILE])


def _parse_recipe(folder: str | Path, text: bytes) -> Recipe:
    where = str(Path(folder) / RECIPE_FILE)
    return recipes.build_recipe(recipes.parse_recipe_keys(text, where), where)


def verify_folder(folder: str | Path) -> Manifest:
    """Check the checksums of all files in a folder, and return the manifest."""
    place = atomic.resolve_path(folder)
    _check_is_folder(place)

    def verify_files() -> Manifest:
        manifest = read_manifest(place)
        verify_checksums(place, manifest, manifest.files)
        return manifest

    return _read_consistently(place, verify_files)


def _check_is_folder(place: Path) -> None:
    if place.is_file():
        form = find_format(place)
        fix = "Give a folder that neuron-merging wrote." if form is None else form.advice
        raise FolderError("this is a file, not a folder", where=str(place), fix=fix)


def _read_consistently(place: Path, read: Callable[[], T]) -> T:
    """Call `read` until the folder is the same one before and after: a writer may replace it meanwhile.

    If the folder is missing and its predecessor exists, a writer was interrupted, and the predecessor is restored.
    """
    while True:
        before = atomic.get_folder_identity(place)
        if before is None and atomic.holds_moved_folder(place):
            with atomic.lock_path(place):
                atomic.recover_folder(place)
            continue
        try:
            content = read()
        except (FolderError, OSError):  # a file may vanish while a writer replaces the folder
            moved = before is None and atomic.holds_moved_folder(place)
            if atomic.get_folder_identity(place) == before and not moved:
                raise
            continue
        if atomic.get_folder_identity(place) == before:
            return content
