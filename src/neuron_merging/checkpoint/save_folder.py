"""Save a compressed network as a self-explanatory folder.

Writers replace a folder atomically and hold a lock, so that readers, which hold none, find the old or the new one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from neuron_merging import atomic
from neuron_merging.checkpoint.card import PretrainedLoading, escape_markdown, render_card
from neuron_merging.checkpoint.load_folder import read_folder
from neuron_merging.checkpoint.manifest import (
    BUFFERS_FILE,
    CARD_FILE,
    FIGURES_FILE,
    INPUTS_FILE,
    MANIFEST_VERSION,
    PLAIN_VERSION,
    PLAN_FILE,
    RECIPE_FILE,
    REPORT_FILE,
    SIGNATURE_FILE,
    WEIGHTS_FILE,
    Manifest,
    StoredFigures,
    encode_figures,
    encode_manifest,
    get_package_versions,
    is_signed_by_user,
    read_manifest,
    sign_plan,
    verify_checksums,
)
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.checkpoint.recipe_names import format_network_title
from neuron_merging.errors import FolderError, MergingError
from neuron_merging.graph.digests import compute_file_sha256
from neuron_merging.graph.example_inputs import flatten_inputs
from neuron_merging.graph.graph_module import GraphNetwork
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.models.companion_files import find_companion_files, render_gguf_tokenizer
from neuron_merging.models.pretrained_config import (
    CONFIG_FILE,
    explain_missing_config,
    find_matching_config,
    is_transformers_model,
    render_config,
    render_original_config,
)
from neuron_merging.models.sources import ORIGINAL_CONFIG_FILE
from neuron_merging.models.state_dicts import write_safetensors
from neuron_merging.onnx.formats import list_suffixes
from neuron_merging.progress import log

if TYPE_CHECKING:  # `Compressed.save` calls `save`, so the class cannot be imported here
    from neuron_merging.checkpoint.compressed import Compressed

FILE_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".gguf", ".h5", ".onx", ".ort", ".pb", ".pt", ".pth", ".safetensors", ".tflite", ".zip"}
)
"""Endings of files that `save` does not write: a folder of such a name would be a surprise."""


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
    >>> import os, tempfile, neuron_merging as nm
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
    # Before the content is built, which may take long.
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
        # Without a checksum in plan.json: `write_report_page` may replace the page later.
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


def write_report_page(folder: str | Path, page: str) -> Path:
    """Write or replace the report.html of a folder, and return its path."""
    place = atomic.resolve_path(folder)
    with atomic.lock_path(place):
        atomic.recover_folder(place)
        read_manifest(place)
        return atomic.replace_file(place / REPORT_FILE, page.encode())


# Checks before anything is written


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
    # An interrupted write of a single file leaves such files behind.
    ours |= {atomic.make_sibling_path(Path(name), role).as_posix() for name in ours for role in ("part", "lock")}
    folders = {name.partition("/")[0] for name in ours if "/" in name}
    below = [file for folder in folders if (place / folder).is_dir() for file in (place / folder).iterdir()]
    files = [file for file in (*place.iterdir(), *below) if file.name not in folders or not file.is_dir()]
    names = [(file.relative_to(place).as_posix(), file.is_dir()) for file in files]
    return sorted(name for name, is_folder in names if name not in ours or is_folder)


# Content of a new folder


def _build_contents(
    compressed: Compressed, recipe: Recipe | None, accuracy: tuple[float, float] | None
) -> tuple[dict[str, atomic.FileContent], Manifest]:
    """Build all files of a folder except plan.json, and the manifest without their checksums."""
    tensors, shared, transient = _collect_tensors(compressed.model)
    text, verdict = _render_recipe(compressed, recipe), compressed.summary.verdict
    recipe, accuracy = recipe or compressed.recipe, accuracy or (verdict.accuracy if verdict else None)
    config = find_matching_config(compressed.model, compressed.plan)
    original = render_original_config(compressed.model, compressed.plan)
    pretrained = None
    if is_transformers_model(compressed.model):
        missing = explain_missing_config(compressed.model, compressed.plan) if config is None else ()
        pretrained = PretrainedLoading(type(compressed.model).__name__, tuple(missing), original is not None)
    card = render_card(_name_network(compressed, recipe), compressed.summary, recipe, accuracy, pretrained)
    files: dict[str, atomic.FileContent] = {
        **_make_tensor_files(tensors, transient),
        **{name: partial(shutil.copyfile, file) for name, file in find_companion_files(compressed.model).items()},
        **render_gguf_tokenizer(compressed.model),
        RECIPE_FILE: text.encode(),
        CARD_FILE: card.encode(),
        **({} if config is None else {CONFIG_FILE: render_config(compressed.model, config).encode()}),
        **({} if original is None else {ORIGINAL_CONFIG_FILE: original.encode()}),
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


def _collect_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """Return each tensor once, the aliases of tensors that are shared, and the names of non-persistent buffers."""
    # `keep_vars` returns the tensors themselves, by whose identity shared ones are recognised.
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


def _check_input_batches(inputs: Iterable[InputBatch] | None) -> list[InputBatch] | None:
    """Return the batches to save. A result stores none itself: they may be larger than the network."""
    # `inputs=True` reads as if the result had stored them, so it gets an error of its own.
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


def _add_checksums(manifest: Manifest, place: Path, names: Iterable[str]) -> Manifest:
    """Return the manifest with the checksums of the files on disk, and the format that these files need."""
    sums = {name: compute_file_sha256(place / name) for name in names}
    is_plain = BUFFERS_FILE not in sums and not any("/" in name for name in sums)
    return msgspec.structs.replace(manifest, files=sums, version=PLAIN_VERSION if is_plain else MANIFEST_VERSION)


# A folder after fine-tuning


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
    # These are written anew, or describe the network before the training.
    rewritten = {WEIGHTS_FILE, BUFFERS_FILE, RECIPE_FILE, CARD_FILE, FIGURES_FILE, INPUTS_FILE}
    names = [name for name in manifest.files if name not in rewritten]
    verify_checksums(place, manifest, names)
    return {name: partial(shutil.copyfile, place / name) for name in names}
