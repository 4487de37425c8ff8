"""Save a compressed network as a self-explanatory folder, and load it again.

Writers replace a folder atomically and hold a lock. Readers hold none: they check that the folder is still the same
one after reading, and read again if it was replaced.
"""

from __future__ import annotations

import os
import shutil
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
from neuron_merging.checkpoint.card import PretrainedLoading, escape_markdown, render_card
from neuron_merging.checkpoint.figures_file import StoredFigures, decode_figures, encode_figures
from neuron_merging.checkpoint.manifest import (
    BUFFERS_FILE,
    CARD_FILE,
    FIGURES_FILE,
    FIX_DAMAGED,
    INPUTS_FILE,
    MANIFEST_VERSION,
    PLAIN_VERSION,
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
from neuron_merging.checkpoint.signature import SIGNATURE_FILE, is_signed_by_user, sign_plan
from neuron_merging.errors import FolderError, MergingError
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.evaluation.figures import Figures
from neuron_merging.evaluation.summary import Summary
from neuron_merging.graph.copying import (
    copy_without_hooks,
    make_meta_tensor,
    named_tensors_with_aliases,
    unwrap_model,
)
from neuron_merging.graph.digests import compute_file_sha256
from neuron_merging.graph.example_inputs import flatten_inputs
from neuron_merging.graph.graph_module import GraphNetwork
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.inputs.input_sets import make_fallback_inputs
from neuron_merging.merging.protocol import MergeResult
from neuron_merging.models import sources
from neuron_merging.models.companion_files import find_companion_files
from neuron_merging.models.pretrained_config import (
    CONFIG_FILE,
    explain_missing_config,
    find_matching_config,
    is_transformers_model,
    render_config,
)
from neuron_merging.models.state_dicts import load_state_dict_checked, read_safetensors, write_safetensors
from neuron_merging.onnx.export import check_int8_target, export_model, quantize_model
from neuron_merging.onnx.formats import find_format, list_suffixes
from neuron_merging.onnx.quantize import DEFAULT_INT8_LOSS, MAX_CALIBRATION_SAMPLES, Int8Network
from neuron_merging.progress import log
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.surgery import apply_plan
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.selection.budget import LossCurve

T = TypeVar("T")
FILE_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".gguf", ".h5", ".onx", ".ort", ".pb", ".pt", ".pth", ".safetensors", ".tflite", ".zip"}
)
"""Endings of files that `save` does not write: a folder of such a name would be a surprise."""


@dataclass(frozen=True, repr=False)
class Compressed:
    """The smaller network, the plan that rebuilds it, and the summary.

    Attributes
    ----------
    model
        The smaller network, an ordinary module of the original's class.
    plan
        The indices that stay, by tensor.
    summary
        Sizes before and after, group by group, and what is not prunable and why. `str` returns it as a text.
    merged
        The merges; their new weights are in `model`. Empty for a network that was loaded from a folder.
    inputs
        The example inputs.
    compared
        The comparison with the original that the verdict in the summary is based on.
    recipe
        The settings, as far as a recipe can express them.
    remarks
        Settings that a recipe cannot express, such as functions.
    curves
        With a budget: the measured loss over the number of kept channels, by group.
    figures
        The measurements that the page and the card show; None for a network that was loaded.
    int8
        With `int8=True`: the quantised network.
    calibration_inputs
        Inputs of the fit and held-out inputs, from which `export` calibrates an int8 file.

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
    merged: MergeResult = field(default=MergeResult(()))
    inputs: tuple[Any, ...] = ()
    compared: Fidelity | None = None
    recipe: Recipe | None = None
    remarks: tuple[str, ...] = ()
    curves: Mapping[str, LossCurve] = field(default_factory=dict)
    figures: Figures | None = None
    int8: Int8Network | None = None
    calibration_inputs: tuple[Sequence[InputBatch], Sequence[InputBatch]] = ((), ())

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{what} {before} -> {after} ({change})" for what, before, after, change in self.summary.sizes
        )
        verdict = self.summary.verdict
        return f"<Compressed {type(self.model).__name__}: {sizes}{f', {verdict.measured}' if verdict else ''}>"

    def _repr_html_(self) -> str:
        """The verdict and the tables of the summary, for notebooks."""
        return self.summary._repr_html_()

    def save(self, folder: str | Path, overwrite: bool = False, inputs: Iterable[InputBatch] | None = None) -> None:
        """Write the folder that `load` reads: weights, plan, recipe, card and figures. Or export an .onnx or .pt2 file.

        Parameters
        ----------
        folder
            Path of a folder, or of a file that ends with .onnx or .pt2. It is written completely or not at all.
        overwrite
            Whether a folder that neuron-merging wrote may be replaced.
        inputs
            Batches for the folder's inputs.safetensors, as `synthesize_inputs` returns them; a result stores none.

        Raises
        ------
        MergingError
            The path exists already.

        Examples
        --------
        >>> import tempfile, neuron_merging as nm
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     nm.compress(net, torch.zeros(1, 4)).save(f"{place}/small")
        """
        if find_format(folder) is not None:
            self.export(folder, int8=self.int8 is not None, overwrite=overwrite)
        else:
            save(self, folder, overwrite=overwrite, inputs=inputs)

    def export(
        self, path: str | Path, *, int8: bool = False, int8_loss: float = DEFAULT_INT8_LOSS, overwrite: bool = False
    ) -> None:
        """Write the smaller network as an .onnx or .pt2 file, run the file, and compare it with the module.

        Parameters
        ----------
        path
            The file. It is written completely or not at all.
        int8
            Quantise it with onnxruntime, calibrated on the inputs that the merges were fitted on; .onnx only.
        int8_loss
            The largest change of the outputs by int8, as a share of their variance; above it, the layers that lose most
            stay in float.
        overwrite
            Whether an existing file may be replaced.

        Raises
        ------
        MergingError
            The file exists already, or has another suffix.

        Examples
        --------
        >>> import tempfile, neuron_merging as nm
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     nm.compress(net, torch.zeros(1, 3, 8, 8)).export(f"{place}/small.onnx", int8=True)
        """
        check_new_file(path, overwrite)
        if not int8:
            export_model(self.model, self.inputs, path)
            return
        check_int8_target(path)
        (self.int8 or self.quantize(int8_loss)).write(path)

    def quantize(self, int8_loss: float = DEFAULT_INT8_LOSS) -> Int8Network:
        """Quantise the smaller network to int8; `export` writes it.

        Parameters
        ----------
        int8_loss
            As for `export`.

        Returns
        -------
        Int8Network
            The int8 file's content, how it was quantised, and how far the outputs changed.

        Examples
        --------
        >>> import neuron_merging as nm
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
        >>> nm.compress(net, torch.zeros(1, 3, 8, 8)).quantize().method
        'static'
        """
        fit, heldout = self.calibration_inputs
        if not fit:
            fit = make_fallback_inputs(analyse(self.model, self.inputs), MAX_CALIBRATION_SAMPLES, seed=0).batches
        return quantize_model(self.model, self.inputs, fit, heldout, max_loss=int8_loss)


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
    """Write a compressed network as a self-explanatory folder.

    Parameters
    ----------
    compressed
        The result of `compress`.
    folder
        Path of the folder. It is written completely or not at all.
    recipe
        The recipe that was used; by default the settings of `compress`, as far as a recipe can express them.
    accuracy
        Accuracy before and after in percent, for the card; by default that of the verdict.
    overwrite
        Whether a folder that neuron-merging wrote may be replaced.
    page
        The HTML report, to be stored as report.html.
    inputs
        Batches to be stored as inputs.safetensors; an empty iterable logs a warning.
    figures
        The content of figures.json; by default the figures of `compressed`.

    Raises
    ------
    MergingError
        The path exists already.
    FolderError
        The network has a state that is not made of tensors.
    OSError
        The disk is full or not writable. An existing folder is unchanged then.

    Examples
    --------
    >>> import tempfile, neuron_merging as nm
    >>> build = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> small = nm.compress(build(), torch.zeros(1, 4), ratio=0.5)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     save(small, f"{place}/small")
    ...     print(sorted(name for name in os.listdir(f"{place}/small") if name[0] != "."))
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
            (new / name).parent.mkdir(exist_ok=True)
            atomic.write_file(new / name, content)
        # plan.json comes after the files whose checksums it holds.
        plan = encode_manifest(_add_checksums(manifest, new, files))
        atomic.write_file(new / PLAN_FILE, plan)
        if (signature := sign_plan(plan)) is not None:
            atomic.write_file(new / SIGNATURE_FILE, signature)
        if page is not None:
            atomic.write_file(new / REPORT_FILE, page.encode())

    with atomic.lock_path(place):
        atomic.recover_folder(place)
        check_target_folder(place, overwrite)  # again: another process may have written since
        atomic.replace_folder(place, fill)


def build_stored_figures(
    compressed: Compressed,
    recipe: Recipe | None,
    *,
    notes: tuple[str, ...] = (),
    sweep: Mapping[str, Any] | None = None,
) -> StoredFigures | None:
    """Build the content of figures.json; None if nothing was measured. `sweep` holds plain values."""
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
    """Return the manifest with the checksums of the files on disk, and the format that these files need."""
    sums = {name: compute_file_sha256(place / name) for name in names}
    is_plain = BUFFERS_FILE not in sums and not any("/" in name for name in sums)
    return msgspec.structs.replace(manifest, files=sums, version=PLAIN_VERSION if is_plain else MANIFEST_VERSION)


def save_finetuned(
    source: str | Path,
    model: nn.Module,
    folder: str | Path,
    *,
    accuracy: tuple[float, float],
    data: str,
    more: Mapping[str, bytes],
) -> None:
    """Write the folder `source` again after fine-tuning: the same plan and recipe, new weights.

    `accuracy` is in percent on `data`, before and after the training. `more` maps names to further files. plan.json
    is written last: without it, `folder` does not count as a network.
    """
    manifest, source_texts = read_folder(source, (RECIPE_FILE, CARD_FILE))
    place, carried = atomic.resolve_path(folder), _read_carried_files(atomic.resolve_path(source), manifest)
    tensors, shared, transient = _collect_tensors(model)
    figures = f"{accuracy[0]:.2f} % before, {accuracy[1]:.2f} % after"
    note = f"\n## Fine-tuned\n\nAccuracy on {escape_markdown(data)}: {figures}.\n"
    texts = {RECIPE_FILE: source_texts[RECIPE_FILE], CARD_FILE: source_texts[CARD_FILE] + note.encode(), **more}
    files: dict[str, atomic.FileContent] = {**_make_tensor_files(tensors, transient), **carried, **texts}
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        atomic.replace_file(place / name, content)
    tuned = msgspec.structs.replace(
        manifest,
        shared=shared,
        transient=transient,
        accuracy=None,  # the original's accuracy was measured on other data, if at all
        versions=get_package_versions(),
    )
    plan = encode_manifest(_add_checksums(tuned, place, files))
    # The recipe is the source's: signing a stranger's would be consent to the code that it names.
    if is_signed_by_user(source) and (signature := sign_plan(plan)) is not None:
        atomic.replace_file(place / SIGNATURE_FILE, signature)
    atomic.replace_file(place / PLAN_FILE, plan)


def _read_carried_files(place: Path, manifest: Manifest) -> dict[str, atomic.FileContent]:
    """Return the files of a folder that do not depend on its weights: configuration, tokenizer, and the like."""
    own = {WEIGHTS_FILE, BUFFERS_FILE, RECIPE_FILE, CARD_FILE, FIGURES_FILE, INPUTS_FILE}
    names = [name for name in manifest.files if name not in own]
    verify_checksums(place, manifest, names)
    return {name: partial(shutil.copyfile, place / name) for name in names}


def write_report_page(folder: str | Path, page: str) -> Path:
    """Write or replace the report.html of a folder, and return its path."""
    place = atomic.resolve_path(folder)
    with atomic.lock_path(place):
        atomic.recover_folder(place)
        read_manifest(place)
        return atomic.replace_file(place / REPORT_FILE, page.encode())


def check_new_file(file: str | Path, overwrite: bool) -> None:
    """Refuse a file that cannot be written, or that exists and may not be replaced."""
    atomic.check_output_file(file)
    if atomic.resolve_path(file).exists() and not overwrite:
        raise MergingError("the file exists", where=str(file), fix="Give another one, or --overwrite.")


def check_target_folder(folder: str | Path, overwrite: bool) -> None:
    """Refuse a folder that may not be written to, before any work is done."""
    place = atomic.resolve_path(folder)
    if place.suffix.lower() in FILE_SUFFIXES and not place.is_dir():
        what, stem = f"a result is a folder or a file of another kind, not a {place.suffix} file", place.stem
        raise MergingError(what, where=str(folder), fix=f"Name it {stem} for a folder, or {list_suffixes(stem)}.")
    atomic.check_writable(place)
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    foreign = _list_foreign_files(place)
    if not overwrite:
        raise MergingError("the folder exists", where=str(folder), fix="Give another one, or --overwrite.")
    if foreign:
        shown = ", ".join(foreign[:6]) + (f" and {len(foreign) - 6} more" if len(foreign) > 6 else "")
        fix = "Move them away, or give another place for the result."
        raise MergingError(
            f"the folder has files that neuron-merging did not write: {shown}", where=str(folder), fix=fix
        )


def _list_foreign_files(place: Path) -> list[str]:
    """List the files in a folder that neuron-merging did not write; raise an error if it did not write the folder."""
    try:
        manifest = read_manifest(place)
    except FolderError as error:
        why = f": {error.what}" if (place / PLAN_FILE).is_file() else ""
        fix = "Give another place for the result."
        raise MergingError(f"something else is there{why}", where=str(place), fix=fix) from error
    ours = {*manifest.files, PLAN_FILE, REPORT_FILE, SIGNATURE_FILE}
    ours |= {atomic.make_sibling_path(Path(name), role).as_posix() for name in ours for role in ("part", "lock")}
    folders = {name.partition("/")[0] for name in ours if "/" in name}
    below = [file for folder in folders if (place / folder).is_dir() for file in (place / folder).iterdir()]
    files = [file for file in (*place.iterdir(), *below) if file.name not in folders or not file.is_dir()]
    names = [(file.relative_to(place).as_posix(), file.is_dir()) for file in files]
    return sorted(name for name, is_folder in names if name not in ours or is_folder)


# Reading


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
        manifest, texts = read_folder(folder)
        fresh = (
            _call_build(build)
            if build is not None
            else _build_from_recipe(folder, texts[RECIPE_FILE], trust, (*above, place))
        )
        small = _make_empty_network(fresh, manifest)
        del fresh  # before the weights are read: never hold both in memory
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
    """Read the manifest and the named texts, each checked against its checksum."""
    place = atomic.resolve_path(folder)
    _check_is_folder(place)

    def read_texts() -> tuple[Manifest, dict[str, bytes]]:
        manifest = read_manifest(place)
        return manifest, read_checked_files(place, manifest, names)

    return _read_consistently(place, read_texts)


def verify_folder(folder: str | Path) -> Manifest:
    """Check the checksums of all files in a folder, and return the manifest."""
    place = atomic.resolve_path(folder)

    def verify_files() -> Manifest:
        manifest = read_manifest(place)
        verify_checksums(place, manifest, manifest.files)
        return manifest

    return _read_consistently(place, verify_files)


def _read_weights(place: Path, manifest: Manifest) -> dict[str, Tensor] | None:
    """Read the weights that belong to a manifest; None if the folder has another manifest by now."""
    if read_manifest(place) != manifest:
        return None
    names = (WEIGHTS_FILE, *(manifest.files.keys() & {BUFFERS_FILE}))
    verify_checksums(place, manifest, names)
    return {key: tensor for name in names for key, tensor in read_safetensors(place / name).items()}


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


def read_plan(path: str | Path) -> Plan:
    """Read the plan of a folder, of a plan.json, or of a file with only a plan."""
    file = Path(path)
    if file.is_dir():
        return read_folder(file, ())[0].plan
    text = read_plan_bytes(file)
    bare = "plan" not in decode_json(text, dict, str(path))
    return Plan.from_json(text) if bare else parse_manifest(text, str(path)).plan


def read_recipe(folder: str | Path) -> Recipe:
    """Read the recipe that a folder was made with."""
    return _parse_recipe(folder, read_folder(folder)[1][RECIPE_FILE])


def read_figures(folder: str | Path) -> tuple[StoredFigures | None, Recipe]:
    """Read the figures and the recipe of a folder; the figures are None in folders of older versions."""
    place = atomic.resolve_path(folder)
    _check_is_folder(place)

    def read_texts() -> dict[str, bytes]:
        manifest = read_manifest(place)
        return read_checked_files(place, manifest, (RECIPE_FILE, *(manifest.files.keys() & {FIGURES_FILE})))

    texts = _read_consistently(place, read_texts)
    figures = decode_figures(texts[FIGURES_FILE], str(place / FIGURES_FILE)) if FIGURES_FILE in texts else None
    return figures, _parse_recipe(folder, texts[RECIPE_FILE])


def _parse_recipe(folder: str | Path, text: bytes) -> Recipe:
    where = str(Path(folder) / RECIPE_FILE)
    return recipes.build_recipe(recipes.parse_recipe_keys(text, where), where)


# Content of a new folder


def _build_contents(
    compressed: Compressed, recipe: Recipe | None, accuracy: tuple[float, float] | None
) -> tuple[dict[str, atomic.FileContent], Manifest]:
    """Build all files of a folder except plan.json, and the manifest without their checksums."""
    tensors, shared, transient = _collect_tensors(compressed.model)
    text, verdict = _render_recipe(compressed, recipe), compressed.summary.verdict
    recipe, accuracy = recipe or compressed.recipe, accuracy or (verdict.accuracy if verdict else None)
    config = find_matching_config(compressed.model, compressed.plan)
    pretrained = None
    if is_transformers_model(compressed.model):
        missing = explain_missing_config(compressed.model, compressed.plan) if config is None else ()
        pretrained = PretrainedLoading(type(compressed.model).__name__, tuple(missing))
    card = render_card(_name_network(compressed, recipe), compressed.summary, recipe, accuracy, pretrained)
    files: dict[str, atomic.FileContent] = {
        **_make_tensor_files(tensors, transient),
        **{name: partial(shutil.copyfile, file) for name, file in find_companion_files(compressed.model).items()},
        RECIPE_FILE: text.encode(),
        CARD_FILE: card.encode(),
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


def _make_tensor_files(tensors: Mapping[str, Tensor], transient: Iterable[str]) -> dict[str, atomic.FileContent]:
    """Return the file of the weights and, if there are any, that of buffers which a state dict leaves out."""
    apart = {name: tensors[name] for name in transient if name in tensors}
    weights = {name: tensor for name, tensor in tensors.items() if name not in apart}
    # transformers needs the format.
    files: dict[str, atomic.FileContent] = {
        WEIGHTS_FILE: lambda part: write_safetensors(part, weights, {"format": "pt"})
    }
    return {**files, BUFFERS_FILE: lambda part: write_safetensors(part, apart)} if apart else files


def _check_input_batches(inputs: Iterable[InputBatch] | None) -> list[InputBatch] | None:
    """Return the batches to save. A result stores none itself: they may be larger than the network."""
    if isinstance(inputs, bool):
        if not inputs:
            return None
        what, fix = "a result does not keep the synthesised inputs", "inputs=nm.synthesize_inputs(model, x).batches"
        raise MergingError(what, where="inputs=", fix=f"Give them: {fix}.")
    return None if inputs is None else list(inputs)


def _concatenate_inputs(batches: Sequence[tuple[Any, ...]]) -> dict[str, Tensor]:
    """Concatenate the batches of each input that is a tensor, by position."""
    columns = zip(*(flatten_inputs(batch) for batch in batches), strict=True)
    return {str(i): torch.cat(column) for i, column in enumerate(columns) if _is_batched_tensor(column[0])}


def _is_batched_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _render_recipe(compressed: Compressed, recipe: Recipe | None) -> str:
    """Render the recipe as YAML; settings that a recipe cannot express become comments."""
    if recipe is not None:
        return recipe.to_yaml()
    remarks = "".join(f"# {' '.join(remark.split())}\n" for remark in compressed.remarks)
    known = compressed.recipe.to_yaml() if compressed.recipe else "# give load() the network with build=\n"
    return f"# compressed from Python\n{remarks}{known}"


def _collect_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """Return each tensor once, the aliases of tensors that are shared, and the names of non-persistent buffers."""
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


# Rebuilding a network from a folder


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
    if os.path.isdir(recipe.model):
        return _load_folder(recipe.model, None, trust, above)
    # Registered networks are built without memory; foreign code may not support the meta device.
    with torch.device("meta") if sources.is_registered_network(recipe.model) else nullcontext():
        return sources.build_from_source(recipe.model, recipe.arg, fresh=True)


def build_or_load_network(model: str, arg: Mapping[str, Any], *, fresh: bool = True, trust: bool = False) -> nn.Module:
    """Build the network that the user's MODEL names, or load it if MODEL is a folder.

    `fresh` skips weights that would have to be fetched. `trust` is whether code that the folder names may run.
    """
    return load(model, trust=trust) if os.path.isdir(model) else sources.build_from_source(model, arg, fresh=fresh)


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
