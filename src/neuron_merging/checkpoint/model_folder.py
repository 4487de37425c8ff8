"""Save a compressed network as a self-explanatory folder, and load it again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from neuron_merging import atomic
from neuron_merging.checkpoint import recipe as recipes
from neuron_merging.checkpoint.card import escape_markdown, render_card
from neuron_merging.checkpoint.figures_file import StoredFigures, decode_figures, encode_figures
from neuron_merging.checkpoint.manifest import (
    CARD_FILE,
    FIGURES_FILE,
    FIX_DAMAGED,
    INPUTS_FILE,
    PLAN_FILE,
    RECIPE_FILE,
    REPORT_FILE,
    WEIGHTS_FILE,
    Manifest,
    decode_json,
    encode_manifest,
    get_package_versions,
    parse_manifest,
    read_checked_files,
    read_manifest,
    read_plan_bytes,
    verify_checksums,
)
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.checkpoint.recipe_names import check_recipe_trusted, format_network_title
from neuron_merging.errors import FolderError, MergingError
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.evaluation.figures import Figures
from neuron_merging.evaluation.summary import Summary
from neuron_merging.graph.copying import copy_without_hooks, named_tensors_with_aliases
from neuron_merging.graph.digests import compute_file_sha256
from neuron_merging.graph.graph_module import GraphNetwork
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.merging.protocol import MergeResult
from neuron_merging.models import sources
from neuron_merging.models.sources import CONFIG_FILE, find_matching_config, is_transformers_model, render_config
from neuron_merging.models.state_dicts import load_state_dict_checked, read_safetensors, write_safetensors
from neuron_merging.onnx.export import export_model
from neuron_merging.onnx.formats import find_format, list_suffixes
from neuron_merging.progress import log
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.surgery import apply_plan
from neuron_merging.selection.budget import LossCurve

T = TypeVar("T")


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
        What was merged, and how; the new weights are in `model`. Empty where a network was read back from a folder.
    inputs
        The example inputs.
    compared
        The comparison with the original that the verdict in the summary comes from.
    recipe
        The settings, as far as a file can name them.
    remarks
        What a file cannot name of them.
    curves
        With a budget: what each group's channels were found to be worth, by the group's name.
    figures
        What the page and the card show, as far as it was measured; None where a network was read back.

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
    merged: MergeResult = field(default=MergeResult(()), repr=False)
    inputs: tuple[Any, ...] = field(default=(), repr=False)
    compared: Fidelity | None = field(default=None, repr=False)
    recipe: Recipe | None = field(default=None, repr=False)
    remarks: tuple[str, ...] = field(default=(), repr=False)
    curves: Mapping[str, LossCurve] = field(default_factory=dict, repr=False)
    figures: Figures | None = field(default=None, repr=False)

    def save(self, folder: str | Path, overwrite: bool = False, inputs: Iterable[InputBatch] | None = None) -> None:
        """Write the folder that `load` reads: weights, plan, recipe, card and figures. Or a file for other programs.

        Parameters
        ----------
        folder
            Where to: a folder, or a file that ends with .onnx or .pt2. It is written whole or not at all.
        overwrite
            Whether a folder that was written here may be replaced.
        inputs
            Batches for the folder's inputs.safetensors, as `synthesize_inputs` returns them: a result keeps none.

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
        if find_format(folder) is not None:
            check_new_file(folder, overwrite)
            export_model(self.model, self.inputs, folder)
        else:
            save(self, folder, overwrite=overwrite, inputs=inputs)


def save(
    compressed: Compressed,
    folder: str | Path,
    *,
    recipe: Recipe | None = None,
    accuracy: tuple[float, float] | None = None,
    overwrite: bool = False,
    page: str | None = None,
    inputs: Iterable[InputBatch] | None = None,
    figures: StoredFigures | None = None,
) -> None:
    """Write a compressed network as a folder that explains itself.

    Parameters
    ----------
    compressed
        What `compress` returned.
    folder
        Where to. It is written whole or not at all.
    recipe
        The settings, where a recipe made it; left out, those that `compress` was given, as far as a file can name them.
    accuracy
        Before and after in percent, for the card; left out, those of the verdict.
    overwrite
        Whether a folder that was written here may be replaced.
    page
        The report, to be put beside the rest.
    inputs
        Batches to put there too; a log says if there are none.
    figures
        What the page shows, to be stored; left out, the figures of `compressed`.

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
    ['README.md', 'figures.json', 'model.safetensors', 'plan.json', 'recipe.yaml']
    """
    if isinstance(compressed.model, GraphNetwork):
        what = "a graph cannot be saved as a folder, because it has no class"
        raise FolderError(what, where=str(folder), fix=f"Save it as {list_suffixes('small')}.")
    place = atomic.resolve_path(folder)
    check_target_folder(place, overwrite)
    files, manifest = _build_contents(compressed, recipe, accuracy)
    if stored := figures or build_stored_figures(compressed, recipe):
        files[FIGURES_FILE] = encode_figures(stored)
    batches = _check_input_batches(inputs)
    if batches:
        files[INPUTS_FILE] = lambda part: write_safetensors(part, _concatenate_inputs(batches))
    elif batches is not None:
        log.warning("no inputs are saved: none were synthesised")
    place.parent.mkdir(parents=True, exist_ok=True)

    def fill(new: Path) -> None:
        for name, content in files.items():
            atomic.write_file(new / name, content)
        atomic.write_file(new / PLAN_FILE, encode_manifest(_add_checksums(manifest, new, files)))
        if page is not None:
            atomic.write_file(new / REPORT_FILE, page.encode())

    with atomic.lock_path(place):
        atomic.recover_folder(place)
        check_target_folder(place, overwrite)
        atomic.replace_folder(place, fill)


def build_stored_figures(
    compressed: Compressed,
    recipe: Recipe | None,
    *,
    notes: tuple[str, ...] = (),
    sweep: Mapping[str, Any] | None = None,
) -> StoredFigures | None:
    """What a folder stores for its page; None where nothing was measured. `sweep` are plain values."""
    if compressed.figures is None:
        return None
    return StoredFigures(
        title=_name_network(compressed, recipe),
        figures=compressed.figures,
        notes=(*(() if recipe else compressed.remarks), *notes),
        curves=dict(compressed.curves),
        sweep=None if sweep is None else dict(sweep),
    )


def _name_network(compressed: Compressed, recipe: Recipe | None) -> str:
    used = recipe or compressed.recipe
    return format_network_title(used.model if used else None, type(compressed.model).__name__)


def _add_checksums(manifest: Manifest, place: Path, names: Iterable[str]) -> Manifest:
    """The manifest with the sums of files as they are on the disk."""
    return msgspec.structs.replace(manifest, files={name: compute_file_sha256(place / name) for name in names})


def save_finetuned(
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
    manifest, kept = read_folder(source, (RECIPE_FILE, CARD_FILE))
    tensors, shared, transient = _collect_tensors(model)
    figures = f"{accuracy[0]:.2f} % before, {accuracy[1]:.2f} % after"
    note = f"\n## Fine-tuned\n\nAccuracy on {escape_markdown(data)}: {figures}.\n"
    texts = {RECIPE_FILE: kept[RECIPE_FILE], CARD_FILE: kept[CARD_FILE] + note.encode(), **more}
    files: dict[str, atomic.FileContent] = {WEIGHTS_FILE: lambda part: write_safetensors(part, tensors), **texts}
    place = atomic.resolve_path(folder)
    for name, content in files.items():
        atomic.replace_file(place / name, content)
    tuned = msgspec.structs.replace(
        manifest,
        shared=shared,
        transient=transient,
        accuracy=None,  # the original's is known on other images, if at all
        versions=get_package_versions(),
    )
    atomic.replace_file(place / PLAN_FILE, encode_manifest(_add_checksums(tuned, place, files)))


def write_report_page(folder: str | Path, page: str) -> Path:
    """Give a folder its page, in place of the one that it may have; its path."""
    place = atomic.resolve_path(folder)
    with atomic.lock_path(place):
        atomic.recover_folder(place)
        read_manifest(place)
        return atomic.replace_file(place / REPORT_FILE, page.encode())


def check_new_file(file: str | Path, overwrite: bool) -> None:
    """Refuse a file that cannot be written, or that is there and may not be replaced."""
    atomic.check_output_file(file)
    if atomic.resolve_path(file).exists() and not overwrite:
        raise MergingError("the file exists", where=str(file), fix="Give another one, or --overwrite.")


def check_target_folder(folder: str | Path, overwrite: bool) -> None:
    """Refuse a place that may not be written to, before any work is done."""
    place = atomic.resolve_path(folder)
    atomic.check_writable(place)
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    strangers = _list_foreign_files(place)
    if not overwrite:
        raise MergingError("the folder exists", where=str(folder), fix="Give another one, or --overwrite.")
    if strangers:
        shown = ", ".join(strangers[:6]) + (f" and {len(strangers) - 6} more" if len(strangers) > 6 else "")
        fix = "Move them away, or give another place for the result."
        raise MergingError(
            f"the folder has files that neuron-merging did not write: {shown}", where=str(folder), fix=fix
        )


def _list_foreign_files(place: Path) -> list[str]:
    """What others put into a folder that was written here; a folder that was not is an error."""
    try:
        manifest = read_manifest(place)
    except FolderError as error:
        why = f": {error.what}" if (place / PLAN_FILE).is_file() else ""
        fix = "Give another place for the result."
        raise MergingError(f"something else is there{why}", where=str(place), fix=fix) from error
    ours = {*manifest.files, PLAN_FILE, REPORT_FILE}
    ours |= {atomic.make_sibling_path(place / name, role).name for name in ours for role in ("part", "lock")}
    return sorted(file.name for file in place.iterdir() if file.name not in ours or file.is_dir())


# Reading


def load(folder: str | Path, *, build: Callable[[], nn.Module] | None = None, trust: bool = False) -> nn.Module:
    """The compressed network in evaluation mode, from a folder that `save` wrote.

    Parameters
    ----------
    folder
        What `save` or `neuron-merging compress` wrote. It is read as data from a stranger: none of it is run.
    build
        Makes a fresh network of the original class; its weights do not matter. Without it the network that the
        recipe names is built: one of ours, timm's or torchvision's.
    trust
        Whether to import and call whatever else the recipe may name, as `package.module:factory`.

    Returns
    -------
    nn.Module
        A network of the original class with fewer channels. Nothing in it depends on the folder any more.

    Raises
    ------
    FolderError
        The folder is missing, damaged, changed or too new, or it names code and is not trusted.
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
    return _load_folder(folder, build, trust, ())


def _load_folder(
    folder: str | Path, build: Callable[[], nn.Module] | None, trust: bool, above: tuple[Path, ...]
) -> nn.Module:
    """`above` are the folders on the way here: each was made from the network in the next."""
    place = atomic.resolve_path(folder)
    if place in above:
        what = "the folder's recipe names the folder itself as its origin"
        raise FolderError(what, where=str(folder), fix="Give load(..., build=) a function for a fresh network.")
    tensors = None
    while tensors is None:  # again if another folder has taken its place meanwhile
        manifest, texts = read_folder(folder)
        fresh = (
            _call_build(build)
            if build is not None
            else _build_from_recipe(folder, texts[RECIPE_FILE], trust, (*above, place))
        )
        small = _make_empty_network(fresh, manifest)
        del fresh  # before the weights come: at no time are both held
        tensors = _read_consistently(place, partial(_read_weights, place, manifest))
    _fill_tensors(small, tensors, manifest, str(folder))
    _tie_shared_tensors(small, manifest.shared)
    return small.eval()


def _check_is_folder(place: Path) -> None:
    if place.is_file():
        form = find_format(place)
        fix = "Give a folder that neuron-merging wrote." if form is None else form.advice
        raise FolderError("this is a file, not a folder", where=str(place), fix=fix)


def read_folder(folder: str | Path, names: tuple[str, ...] = (RECIPE_FILE,)) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the named texts, each checked against its sum."""
    place = atomic.resolve_path(folder)
    _check_is_folder(place)

    def look() -> tuple[Manifest, dict[str, bytes]]:
        manifest = read_manifest(place)
        return manifest, read_checked_files(place, manifest, names)

    return _read_consistently(place, look)


def verify_folder(folder: str | Path) -> Manifest:
    """The manifest, once every file has the sum that it should have."""
    place = atomic.resolve_path(folder)

    def look() -> Manifest:
        manifest = read_manifest(place)
        verify_checksums(place, manifest, manifest.files)
        return manifest

    return _read_consistently(place, look)


def _read_weights(place: Path, manifest: Manifest) -> dict[str, Tensor] | None:
    """The tensors that a manifest speaks of, or None if it is no longer that of the folder."""
    if read_manifest(place) != manifest:
        return None
    verify_checksums(place, manifest, (WEIGHTS_FILE,))
    return read_safetensors(place / WEIGHTS_FILE)


def _read_consistently(place: Path, look: Callable[[], T]) -> T:
    """What a look at a folder finds, all of it in the same folder: a writer may put another in its place."""
    old = atomic.make_sibling_path(place, "old")
    while True:
        before = atomic.get_folder_identity(place)
        if before is None and old.exists():
            with atomic.lock_path(place):
                atomic.recover_folder(place)
            continue
        try:
            found = look()
        except (FolderError, OSError):  # a writer may take a file away between two looks at it
            if atomic.get_folder_identity(place) == before and (before is not None or not old.exists()):
                raise
            continue
        if atomic.get_folder_identity(place) == before:
            return found


def read_plan(path: str | Path) -> Plan:
    """The plan in a folder, in its plan.json, or in a file of its own."""
    file = Path(path)
    if file.is_dir():
        return read_folder(file, ())[0].plan
    text = read_plan_bytes(file)
    bare = "plan" not in decode_json(text, dict, str(path))
    return Plan.from_json(text) if bare else parse_manifest(text, str(path)).plan


def read_recipe(folder: str | Path) -> Recipe:
    """The recipe that a folder was made with."""
    return _parse_recipe(folder, read_folder(folder)[1][RECIPE_FILE])


def read_figures(folder: str | Path) -> tuple[StoredFigures | None, Recipe]:
    """The figures that a folder stores, and its recipe; None where it has none, as folders of older versions."""
    place = atomic.resolve_path(folder)
    _check_is_folder(place)

    def look() -> dict[str, bytes]:
        manifest = read_manifest(place)
        return read_checked_files(place, manifest, (RECIPE_FILE, *(manifest.files.keys() & {FIGURES_FILE})))

    texts = _read_consistently(place, look)
    figures = decode_figures(texts[FIGURES_FILE], str(place / FIGURES_FILE)) if FIGURES_FILE in texts else None
    return figures, _parse_recipe(folder, texts[RECIPE_FILE])


def _parse_recipe(folder: str | Path, text: bytes) -> Recipe:
    where = str(Path(folder) / RECIPE_FILE)
    return recipes.build_recipe(recipes.parse_recipe_keys(text, where), where)


# What is written


def _build_contents(
    compressed: Compressed, recipe: Recipe | None, accuracy: tuple[float, float] | None
) -> tuple[dict[str, atomic.FileContent], Manifest]:
    """Every file of the folder but plan.json, and that without the sums of the others."""
    tensors, shared, transient = _collect_tensors(compressed.model)
    text, verdict = _render_recipe(compressed, recipe), compressed.summary.verdict
    recipe, accuracy = recipe or compressed.recipe, accuracy or (verdict.accuracy if verdict else None)
    config = find_matching_config(compressed.model, compressed.plan)
    alone = (
        None
        if not is_transformers_model(compressed.model)
        else ""
        if config is None
        else type(compressed.model).__name__
    )
    files: dict[str, atomic.FileContent] = {
        WEIGHTS_FILE: lambda part: write_safetensors(part, tensors, {"format": "pt"}),
        RECIPE_FILE: text.encode(),
        CARD_FILE: render_card(_name_network(compressed, recipe), compressed.summary, recipe, accuracy, alone).encode(),
        **({} if config is None else {CONFIG_FILE: render_config(compressed.model, config).encode()}),
    }
    manifest = Manifest(
        plan=compressed.plan,
        files={},
        shared=shared,
        transient=transient,
        parameters=compressed.summary.parameters,
        macs=compressed.summary.macs,
        accuracy=accuracy,
        versions=get_package_versions(),
    )
    return files, manifest


def _check_input_batches(inputs: Iterable[InputBatch] | None) -> list[InputBatch] | None:
    """The batches to save. A result keeps none itself: they may be larger than the network."""
    if isinstance(inputs, bool):
        if not inputs:
            return None
        what, fix = "a result does not keep the synthesised inputs", "inputs=nm.synthesize_inputs(model, x).batches"
        raise MergingError(what, where="inputs=", fix=f"Give them: {fix}.")
    return None if inputs is None else list(inputs)


def _concatenate_inputs(batches: Sequence[tuple[Any, ...]]) -> dict[str, Tensor]:
    """All batches of each input that is a tensor, one after the other, by its position."""
    columns = zip(*(flatten_inputs(batch) for batch in batches), strict=True)
    return {str(i): torch.cat(column) for i, column in enumerate(columns) if _is_batched_tensor(column[0])}


def _is_batched_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _render_recipe(compressed: Compressed, recipe: Recipe | None) -> str:
    """The recipe that was used; of settings from Python, with what no recipe can name as remarks."""
    if recipe is not None:
        return recipe.to_yaml()
    remarks = "".join(f"# {' '.join(remark.split())}\n" for remark in compressed.remarks)
    known = compressed.recipe.to_yaml() if compressed.recipe else "# give load() the network with build=\n"
    return f"# compressed from Python\n{remarks}{known}"


def _collect_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
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
    return {k: v for k, v in (state | transient).items() if k not in shared}, shared, tuple(transient)


# What is read


def _call_build(build: Callable[[], nn.Module]) -> nn.Module:
    """What the user's function makes: its own errors are the user's to see."""
    if isinstance(build, nn.Module) or not callable(build):
        what = f"build is a {type(build).__name__}, not a function"
        raise MergingError(what, where="build=", fix="Give a function, as build=lambda: MyNetwork().")
    made = build()
    if not isinstance(made, nn.Module):
        what = f"build returned a {type(made).__name__}, not a network"
        raise MergingError(what, where="build=", fix="Return a fresh network of the original class.")
    return made


def _build_from_recipe(folder: str | Path, text: bytes, trust: bool, above: tuple[Path, ...]) -> nn.Module:
    """The network that a folder's recipe names, where it may be built."""
    recipe = _parse_recipe(folder, text)
    if recipe.model is None or not sources.can_rebuild(recipe.model):
        raise FolderError(
            f"the recipe names no network that can be built ({recipe.model or 'it was compressed from Python'})",
            where=str(folder),
            fix="Give load(..., build=) a function, or --model its name, for a fresh network of the original class.",
        )
    check_recipe_trusted(recipe, folder, trust, keys=("model",))
    if os.path.isdir(recipe.model):
        return _load_folder(recipe.model, None, trust, above)
    with torch.device("meta") if sources.is_registered_network(recipe.model) else nullcontext():
        return sources.build_from_source(recipe.model, recipe.arg, fresh=True)


def build_or_load_network(model: str, arg: Mapping[str, Any], *, fresh: bool = True, trust: bool = False) -> nn.Module:
    """The network that the user's MODEL names, which may be a folder.

    `fresh` does without weights that would be fetched; `trust` is what the user says of that folder.
    """
    return load(model, trust=trust) if os.path.isdir(model) else sources.build_from_source(model, arg, fresh=fresh)


def _make_empty_network(fresh: nn.Module, manifest: Manifest) -> nn.Module:
    """A network like that one with the plan's shapes, in which no tensor that the folder has takes any memory."""
    filled = {*fresh.state_dict(), *manifest.transient}
    empty = {
        id(tensor): _make_meta_tensor(tensor)
        for name, tensor in named_tensors_with_aliases(fresh).items()
        if name in filled
    }
    twin = copy_without_hooks(fresh, empty)
    _tie_shared_tensors(twin, manifest.shared)
    return apply_plan(twin, manifest.plan)


def _make_meta_tensor(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _tie_shared_tensors(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Names that were one tensor become one tensor again."""
    known = named_tensors_with_aliases(model)
    for name, home in shared.items():
        if name in known and home in known and known[name] is not known[home]:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, known[home])


def _fill_tensors(model: nn.Module, tensors: Mapping[str, Tensor], manifest: Manifest, where: str) -> None:
    """Give the network exactly the stored tensors, in their own precision."""
    homes = {**{name: name for name in tensors}, **manifest.shared}
    for name in {*manifest.shared.values(), *manifest.transient}:
        if homes.get(name) not in tensors:
            raise FolderError(f"{name!r} is not among the weights", where=where, fix=FIX_DAMAGED)
    state = {name: tensors[home] for name, home in homes.items()}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in manifest.transient:
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
