"""Check the options of `reproduce`, and find the checkpoints that each table or figure needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from neuron_merging import atomic
from neuron_merging.data import FolderImages
from neuron_merging.errors import MergingError
from neuron_merging.reproduction import experiments
from neuron_merging.reproduction.experiments import (
    PAPER_TARGETS,
    MergeMethod,
    PaperNetwork,
    PaperPanel,
    PaperTarget,
    filter_runnable_methods,
    parse_methods,
)
from neuron_merging.reproduction.measurements import (
    AdvanceProgress,
    PaperCheckpoint,
    list_weight_folders,
    open_test_images,
)

ALL_TARGETS = "all"


@dataclass(frozen=True)
class ReproduceOptions:
    """The options of one run; None or empty means as in the paper."""

    targets: tuple[PaperTarget, ...]
    out: Path
    weights: tuple[tuple[str, str], ...] = ()
    """Pairs of a network's name and a file."""
    data: str | None = None
    limit: int | None = None
    download: bool = False
    device: str | None = None
    methods: tuple[MergeMethod, ...] = tuple(MergeMethod(name) for name in experiments.PAPER_METHODS)

    @property
    def has_single_network(self) -> bool:
        """Whether the selected targets have only one network."""
        return len(list_panel_networks(self.targets)) == 1


def parse_options(
    what: str,
    *,
    weights: list[str] | None = None,
    data: str | None = None,
    limit: int | None = None,
    download: bool = False,
    device: str | None = None,
    methods: str | None = None,
    criteria: str | None = None,
    ratios: str | None = None,
    out: str | None = None,
) -> ReproduceOptions:
    """Parse the options of the command line; raise for invalid ones.

    >>> found = parse_options("table1", limit=100, ratios="0.5")
    >>> found.targets[0].panels[0].ratios, str(found.out)
    ((0.5,), 'reproduce/table1')
    """
    targets = _parse_targets(what)
    if limit is not None and limit < 1:
        raise MergingError(f"{limit} images are too few", where="--limit", fix="Give at least 1.")
    place = Path(out or f"reproduce/{what}")
    atomic.check_writable(place.absolute() / "cache")
    if data is not None and not os.path.isdir(data):
        raise MergingError("there is no such folder", where=f"--data {data}", fix="Give the folder that has the data.")
    return ReproduceOptions(
        targets=tuple(
            _narrow_target(target, _parse_criteria(criteria), _parse_ratios(ratios), limit) for target in targets
        ),
        out=place,
        weights=_parse_weights(weights or (), targets),
        data=data,
        limit=limit,
        download=download,
        device=device,
        methods=parse_methods(methods) if methods is not None else ReproduceOptions.methods,
    )


def _parse_targets(what: str) -> tuple[PaperTarget, ...]:
    if what == ALL_TARGETS:
        return tuple(PAPER_TARGETS.values())
    if what not in PAPER_TARGETS:
        raise MergingError(
            f"there is no {what!r} in the paper", where="WHAT", fix=_suggest_names({**PAPER_TARGETS, ALL_TARGETS: None})
        )
    return (PAPER_TARGETS[what],)


def _suggest_names(names: dict[str, object]) -> str:
    return f"Give one of {', '.join(names)}."


def _narrow_target(
    target: PaperTarget, criteria: tuple[str, ...], ratios: tuple[float, ...], limit: int | None
) -> PaperTarget:
    panels = tuple(replace(panel, ratios=ratios or panel.ratios) for panel in target.panels)
    title = add_limit_to_title(target.title, limit)
    return replace(target, title=title, panels=panels, criteria=criteria or target.criteria)


def add_limit_to_title(title: str, limit: int | None) -> str:
    """Say in a title that only some images were used, which are too few to judge the paper by.

    >>> add_limit_to_title("Table 1", 300)
    'Table 1 (only the first 300 test images: not judged against the paper)'
    """
    if limit is None:
        return title
    images = "test image" if limit == 1 else f"{limit} test images"
    return f"{title} (only the first {images}: not judged against the paper)"


def _parse_criteria(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    from neuron_merging.selection.criteria import find_criterion

    found = tuple(dict.fromkeys(text.split(",")))
    for name in found:
        find_criterion(name)
    return found


def _parse_ratios(text: str | None) -> tuple[float, ...]:
    found = []
    for part in text.split(",") if text is not None else ():
        try:
            found.append(float(part))
        except ValueError:
            # Out of range, so that the check below reports it with the same message.
            found.append(0.0)
        if not 0 < found[-1] < 1:
            what = f"{part!r} is not a share between 0 and 1"
            raise MergingError(what, where="--ratios", fix="For instance --ratios 0.3,0.5.")
    return tuple(dict.fromkeys(found))


def _parse_weights(entries: Sequence[str], targets: tuple[PaperTarget, ...]) -> tuple[tuple[str, str], ...]:
    """Return pairs of network and file, without duplicates."""
    found = [_parse_weight(entry, targets) for entry in entries]
    # The same file under two names would count as two checkpoints in the mean.
    return tuple({(name, os.path.realpath(file)): (name, file) for name, file in found}.values())


def _parse_weight(entry: str, targets: tuple[PaperTarget, ...]) -> tuple[str, str]:
    """Parse NETWORK=FILE, or FILE if only one network is selected."""
    # The name of a file may contain an equals sign.
    name, equals, file = ("", "", entry) if os.path.isfile(entry) else entry.partition("=")
    names = list_panel_networks(targets)
    if not equals:
        if len(names) > 1:
            fix = f"Write NETWORK=FILE; the networks are {', '.join(names)}."
            raise MergingError(f"{entry!r} does not say which network it is for", where="--weights", fix=fix)
        name, file = names[0], entry
    if not os.path.isfile(file):
        fix = "Give a .safetensors, .pt or .pth file, as NETWORK=FILE."
        raise MergingError(f"there is no file {file!r}", where=f"--weights {entry}", fix=fix)
    name = _complete_name(name, names)
    if not any(can_fill_panel(name, panel, alone=len(names) == 1) for target in targets for panel in target.panels):
        fix = f"The networks are {', '.join(names)}, or others of their kind on the same data."
        raise MergingError(f"{name} does not belong to these tables and figures", where=f"--weights {entry}", fix=fix)
    return experiments.find_paper_network(name).name, file


def list_panel_networks(targets: tuple[PaperTarget, ...]) -> list[str]:
    """Return the networks of the selected tables and figures."""
    return list(dict.fromkeys(panel.network for target in targets for panel in target.panels))


def _complete_name(name: str, names: list[str]) -> str:
    """Complete an abbreviation such as `lenet`, if only one network starts with it."""
    matches = [known for known in names if known.startswith(f"{name}-")]
    return matches[0] if name not in names and len(matches) == 1 else name


def can_fill_panel(name: str, panel: PaperPanel, *, alone: bool) -> bool:
    """Return whether a network can be used for a panel.

    It can if it is the panel's network, or one of a substitute family: with several networks (not `alone`), only one of
    the same family and data set.
    """
    given, default = experiments.find_paper_network(name), experiments.find_paper_network(panel.network)
    if name == panel.network:
        return True
    return given.family in panel.substitute_families and (
        alone or (given.family, given.data) == (default.family, default.data)
    )


@dataclass(frozen=True)
class PanelNetwork:
    """A network of a table or figure with its checkpoints."""

    panel: PaperPanel
    network: PaperNetwork
    checkpoints: tuple[PaperCheckpoint, ...]


@dataclass(frozen=True)
class RunnableTarget:
    """The networks of a target that can run, and a message for each that cannot."""

    target: PaperTarget
    entries: tuple[PanelNetwork, ...]
    left_out: tuple[str, ...]


@dataclass
class CheckpointFinder:
    """Finds checkpoints and loads each file once for all targets."""

    options: ReproduceOptions
    device: torch.device
    advance: AdvanceProgress
    _found: dict[tuple[str, Path], PaperCheckpoint] = field(default_factory=dict)

    def find_all(self) -> list[RunnableTarget]:
        """Return the runnable networks of every target; raise if none can run."""
        runnable = [self._find_target_checkpoints(target) for target in self.options.targets]
        if not any(target.entries for target in runnable):
            messages = dict.fromkeys(message for target in runnable for message in target.left_out)
            raise MergingError("nothing can run: " + "; ".join(messages), where="reproduce")
        return runnable

    def _find_target_checkpoints(self, target: PaperTarget) -> RunnableTarget:
        entries: list[PanelNetwork] = []
        left_out: list[str] = []
        for panel in target.panels:
            for name, files in self._list_weight_files(panel).items():
                network = experiments.find_paper_network(name)
                try:
                    entries.append(
                        PanelNetwork(panel, network, tuple(self._open_checkpoint(network, file) for file in files))
                    )
                except _NetworkSkipped as reason:
                    left_out.append(str(reason))
                    continue
                left_out += self._list_remarks(entries[-1])
        return RunnableTarget(target, tuple(entries), tuple(left_out))

    def _list_remarks(self, entry: PanelNetwork) -> Iterator[str]:
        """Yield remarks on methods that cannot run and on incomplete data."""
        dropped = set(self.options.methods) - set(filter_runnable_methods(entry.network, self.options.methods))
        for method in dropped:
            yield f"{entry.network.title} is left out of {method.label}: there are no training images"
        images = entry.checkpoints[0].images
        if isinstance(images, FolderImages) and images.classes != entry.checkpoints[0].classes:
            yield (
                f"{entry.network.title}: {images.classes} class folders were found instead of "
                f"{entry.checkpoints[0].classes:,}: the labels are right only if these are the first classes"
            )

    def _list_weight_files(self, panel: PaperPanel) -> dict[str, list[Path | None]]:
        """Return the given files by network; None stands for a file to search."""
        found: dict[str, list[Path | None]] = {}
        for name, file in self.options.weights:
            if can_fill_panel(name, panel, alone=self.options.has_single_network):
                found.setdefault(name, []).append(Path(file))
        return found or {panel.network: [None]}

    def _open_checkpoint(self, network: PaperNetwork, given: Path | None) -> PaperCheckpoint:
        file = given or self._search_weights(network)
        if (network.name, file) not in self._found:
            try:
                images = open_test_images(network, self.options.data, self.options.limit, self.options.download)
            except MergingError as error:
                raise _NetworkSkipped(f"{network.title} is left out: {error}") from error
            self._found[network.name, file] = PaperCheckpoint(
                network, file, images, self.options.data, self.device, self.advance
            )
        return self._found[network.name, file]

    def _search_weights(self, network: PaperNetwork) -> Path:
        places = list_weight_folders(self.options.data)
        found = next((place / name for place in places for name in network.files if (place / name).is_file()), None)
        if found is None:
            raise _NetworkSkipped(
                f"{network.title} is left out: no weights, looked for {' or '.join(network.files)} in "
                f"{', '.join(map(str, places))}. {_suggest_weights(network)}"
            )
        return found


class _NetworkSkipped(Exception):
    """A network cannot run; the message contains the reason."""


def _suggest_weights(network: PaperNetwork) -> str:
    if network.data == "imagenet":
        return f"They are torchvision's: put them into the data folder, or give --weights {network.name}=FILE."
    data = "" if network.name == network.architecture else f" --data {network.data}"
    train = f"neuron-merging train {network.architecture}{data} --out DIR"
    return f"Train it: {train}; then give --weights {network.name}=DIR/model.safetensors."


def describe_checkpoints(runnable: RunnableTarget) -> Iterator[dict[str, object]]:
    """Yield the weights, images and hyperparameters of every checkpoint, for the page."""
    for entry in runnable.entries:
        for checkpoint in entry.checkpoints:
            yield {
                "network": entry.network.title,
                "weights": str(checkpoint.file),
                "sha256": checkpoint.weights_digest,
                "images": f"{checkpoint.images.name}, {len(checkpoint.images):,} images",
                "t": entry.network.threshold,
                "lambda": entry.network.balance,
            }
