"""finetune: go on training a compressed network, and write it as a folder again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_merging.errors import MergingError
from neuron_merging.folder import recipe as recipes
from neuron_merging.tool.commands import show
from neuron_merging.tool.commands.source import Folder, Json, Rebuild
from neuron_merging.tool.commands.training import Data, Numbers, Run, announce, own_data, resumable

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.data import Images


def finetune(
    folder: Folder,
    /,
    *,
    out: str | None = None,
    data: Data | None = None,
    numbers: Numbers | None = None,
    run: Run | None = None,
    rebuild: Rebuild | None = None,
    json: Json = False,
) -> None:
    """Train a compressed network further: a tenth of the paper's epochs at a tenth of its learning rate.

    Parameters
    ----------
    out
        The folder to write (default FOLDER-tuned); it is of the same kind, with the same plan.
    """
    from neuron_merging.folder import store
    from neuron_merging.training import processes, runs, train
    from neuron_merging.training.settings import tuning

    how = run or Run()
    team = processes.current(how.device)
    out = out or f"{os.path.normpath(folder)}-tuned"
    _check_target(out)
    small, network = _small(folder, rebuild or Rebuild())
    recipe = (numbers or Numbers()).over(tuning(network))
    images, test = (data or Data()).open(own_data(network))
    about = {"network": network, "digest": store.read(folder, ())[0].digest}
    announce(images, test, team)
    with resumable():
        done = train(small, images, recipe, test=test, out=out, resume=how.resume, about=about, processes=team)
    if team.rank > 0:
        return
    scores = _accuracy(small, test), _accuracy(done.model, test)
    notes = {name: (Path(out) / name).read_bytes() for name in (runs.SETTINGS, runs.LOG)}
    store.save_tuned(folder, done.model, out, accuracy=scores, data=f"{len(test):,} images of {test.name}", more=notes)
    (Path(out) / runs.CHECKPOINT).unlink(missing_ok=True)
    _show(out, scores, len(done.log), json)


def _check_target(out: str) -> None:
    """Refuse, before any work is done, to replace a compressed network."""
    from neuron_merging import atomic
    from neuron_merging.folder.manifest import PLAN

    atomic.place_of(out)
    if os.path.isfile(os.path.join(out, PLAN)):
        raise MergingError("a compressed network is there already", where=out, fix="Give another --out.")


def _small(folder: str, rebuild: Rebuild) -> tuple[nn.Module, str]:
    """The network of a folder and the name of the one that it was made from."""
    from neuron_merging.folder import store
    from neuron_merging.folder.trust import check_arguments

    recipe, name = store.recipe_of(folder), rebuild.model
    if name is None:
        return store.load(folder, trust=rebuild.trust), recipe.model or ""
    arg = recipes.pairs(rebuild.arg, "--arg") or recipe.arg
    if rebuild.arg is None:
        check_arguments(name, arg, folder, rebuild.trust)
    return store.load(folder, build=lambda: store.build_network(name, arg, trust=rebuild.trust)), name


def _accuracy(model: nn.Module, images: Images) -> float:
    from neuron_merging import measuring

    return measuring.accuracy(*measuring.predict(model, images.batches(256)))


def _show(out: str, scores: tuple[float, float], epochs: int, as_json: bool) -> None:
    before, after = scores
    if as_json:
        return show.json({"accuracy": scores, "epochs": epochs, "written": out})
    row = ("accuracy", f"{before:.2f} %", f"{after:.2f} %", f"{after - before:+.2f}")
    show.table("", ("", "before", "after", "change"), [row])
    show.say(f"written to {out}")
