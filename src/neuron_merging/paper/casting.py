"""casting: which checkpoints stand for the paper's networks, and which networks are left out and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from neuron_merging.data import FolderImages
from neuron_merging.errors import MergingError
from neuron_merging.paper import settings
from neuron_merging.paper.checkpoint import Advance, Checkpoint, folders, open_images
from neuron_merging.paper.methods import runnable
from neuron_merging.paper.options import Options, fits
from neuron_merging.paper.settings import Network, Panel, Target


@dataclass(frozen=True)
class Entry:
    """A network of a table or figure with its checkpoints."""

    panel: Panel
    network: Network
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True)
class Cast:
    """All networks of one target that can run, and a message for each that cannot."""

    target: Target
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...]


@dataclass
class Casting:
    """Finds checkpoints; the same file serves all targets, so that it is loaded once."""

    options: Options
    device: torch.device
    advance: Advance
    _found: dict[tuple[str, Path], Checkpoint] = field(default_factory=dict)

    def casts(self) -> list[Cast]:
        """One for each target; an error if nothing at all can run."""
        casts = [self._cast(target) for target in self.options.targets]
        if not any(cast.entries for cast in casts):
            messages = dict.fromkeys(message for cast in casts for message in cast.left_out)
            raise MergingError("nothing can run: " + "; ".join(messages), where="reproduce")
        return casts

    def _cast(self, target: Target) -> Cast:
        entries: list[Entry] = []
        left_out: list[str] = []
        for panel in target.panels:
            for name, files in self._files(panel).items():
                network = settings.network(name)
                try:
                    entries.append(Entry(panel, network, tuple(self._checkpoint(network, file) for file in files)))
                except _LeftOut as reason:
                    left_out.append(str(reason))
                    continue
                left_out += self._remarks(entries[-1])
        return Cast(target, tuple(entries), tuple(left_out))

    def _remarks(self, entry: Entry) -> Iterator[str]:
        """What else does not run, or is not what it seems."""
        dropped = set(self.options.methods) - set(runnable(entry.network, self.options.methods))
        for method in dropped:
            yield f"{entry.network.title} is left out of {method.label}: there are no training images"
        images = entry.checkpoints[0].images
        if isinstance(images, FolderImages) and images.classes != entry.checkpoints[0].classes:
            yield (
                f"{entry.network.title}: {images.classes} folders of classes are there, not "
                f"{entry.checkpoints[0].classes:,}: the labels are right only if they are the first ones"
            )

    def _files(self, panel: Panel) -> dict[str, list[Path | None]]:
        """By network the files that were given, else one that is to be looked for."""
        found: dict[str, list[Path | None]] = {}
        for name, file in self.options.weights:
            if fits(name, panel, alone=self.options.alone):
                found.setdefault(name, []).append(Path(file))
        return found or {panel.network: [None]}

    def _checkpoint(self, network: Network, given: Path | None) -> Checkpoint:
        file = given or self._search(network)
        if (network.name, file) not in self._found:
            try:
                images = open_images(network, self.options.data, self.options.limit, self.options.download)
            except MergingError as error:
                raise _LeftOut(f"{network.title} is left out: {error}") from error
            self._found[network.name, file] = Checkpoint(
                network, file, images, self.options.data, self.device, self.advance
            )
        return self._found[network.name, file]

    def _search(self, network: Network) -> Path:
        places = folders(self.options.data)
        found = next((place / name for place in places for name in network.files if (place / name).is_file()), None)
        if found is None:
            raise _LeftOut(
                f"{network.title} is left out: no weights, looked for {' or '.join(network.files)} in "
                f"{', '.join(map(str, places))}. {_advice(network)}"
            )
        return found


class _LeftOut(Exception):
    """A network that cannot run here."""


def _advice(network: Network) -> str:
    if network.data == "imagenet":
        return f"They are torchvision's: put them into the data folder, or give --weights {network.name}=FILE."
    data = "" if network.name == network.architecture else f" --data {network.data}"
    train = f"neuron-merging train {network.architecture}{data} --out DIR"
    return f"Train it: {train}; then give --weights {network.name}=DIR/model.safetensors."


def subjects(cast: Cast) -> Iterator[dict[str, object]]:
    """What was measured, for the record."""
    for entry in cast.entries:
        for checkpoint in entry.checkpoints:
            yield {
                "network": entry.network.title,
                "weights": str(checkpoint.file),
                "sha256": checkpoint.weights_digest,
                "images": f"{checkpoint.images.name}, {len(checkpoint.images):,} images",
                "t": entry.network.threshold,
                "lambda": entry.network.balance,
            }
