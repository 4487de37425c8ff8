"""compress: a network in, a folder or a file with a smaller one out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from neuron_merging.errors import MergingError
from neuron_merging.folder import recipe as recipes
from neuron_merging.tool.commands import result, show
from neuron_merging.tool.commands import source as sources
from neuron_merging.tool.commands.source import Source, Switch, Texts


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Choices:
    """What to remove and how, each a key of a recipe; None where the flag was not given.

    Parameters
    ----------
    budget
        The way to say how small: what the result may cost, as macs=50%, params=1.2M, weights=3MB or latency=5ms; may
        be repeated. How much each layer loses is found by what that does to the network's answers.
    ratio
        For those who know why: the share of channels to remove from each group (default 0.5, without a budget).
    limits
        With a budget: what some layers may lose at most, as 'PATTERN=RATIO'; may be repeated.
    layer
        Another ratio for some layers, as 'PATTERN=RATIO'; may be repeated.
    ignore
        Layers to leave whole, as a pattern; may be repeated.
    scope
        "internal" (default) or "all": residual streams too.
    criterion
        Which channels stay: auto (default), expected-error, l1, l2, l2-gm, random, or package.module:function.
    merger
        none, cosine, linear, fold, moments, calibrated or package.module:Class, with options after a colon:
        cosine:threshold=0.2,bn=released. The default is the best that needs no data, or calibrated with --calibrate.
    round_to
        Keep a multiple of this many channels.
    uniform
        Layers that repeat keep equal numbers of channels and none gets a new bias, so that the original's
        configuration, with other numbers, describes the result (transformers' from_pretrained).
    effort
        What may be spent on inputs of our own making: fast (seconds), normal (default), best.
    seed
        For the criterion "random" and for synthetic inputs.
    calibrate
        Data to measure statistics on: a folder of images, a .npz or .safetensors file, package.module:function that
        yields batches, or NAME or NAME:PATH (digits, cifar-10, …).
    calibrate_images
        How many of them (default 512).
    output
        "module" (default) for a network of the same class, "graph" for its captured graph, which can be cut where the
        class holds a number of channels as a constant; OUT is then an .onnx or .pt2 file.
    max_loss
        In place of a ratio or a budget: the smallest network whose score is at most so much (0.01 or 1%) below the
        original's: the --metric, else the accuracy on --eval, else the fidelity of the outputs.
    eval
        Data to judge on, as for --calibrate; with labels, the accuracy before and after is given.
    metric
        A score of your own: package.module:function of a network and the batches of --eval (without --eval, of a
        network) that returns a number, the higher the better.
    require
        The least fidelity of the outputs that is acceptable, as 0.95; below, nothing is written and the exit code is 6.
    mean
        Of each channel of images in a folder or file, of pixels in 0..1, as 0.485,0.456,0.406; one number for grey.
    std
        The same for the standard deviation.
    resize
        What the short side of images in a folder becomes.
    crop
        The square that is cut out of their middle (default: the size that the network takes).
    report
        Write an HTML page into the folder too (default).
    keep_inputs
        Write the inputs that the network remembered into the folder too, as inputs.safetensors.
    overwrite
        Replace the folder if it exists.
    dry_run
        Do everything but write.
    json
        Print JSON in place of tables.
    """

    budget: Texts = None
    ratio: float | None = None
    limits: Texts = None
    max_loss: str | None = None
    layer: Texts = None
    ignore: Texts = None
    scope: str | None = None
    criterion: str | None = None
    merger: str | None = None
    round_to: int | None = None
    uniform: Switch = None
    effort: str | None = None
    seed: int | None = None
    calibrate: str | None = None
    calibrate_images: int | None = None
    output: str | None = None
    eval: str | None = None
    metric: str | None = None
    require: str | None = None
    mean: str | None = None
    std: str | None = None
    resize: int | None = None
    crop: int | None = None
    report: Annotated[bool | None, Parameter(negative="--no-report")] = None
    keep_inputs: Switch = None
    overwrite: Switch = None
    dry_run: Switch = None
    json: Switch = None

    def flags(self) -> dict[str, Any]:
        """As keys of a recipe."""
        texts = {"layer": self.layer, "budget": self.budget, "limits": self.limits}
        return {**asdict(self), **{key: recipes.pairs(entries, f"--{key}") for key, entries in texts.items()}}


def compress(
    model: str,
    out: str,
    /,
    *,
    choices: Choices | None = None,
    source: Source | None = None,
    recipe: str | None = None,
) -> None:
    """Remove channels, merge them into those that stay, and write a folder or a file.

    Parameters
    ----------
    model
        A built-in network's name, package.module:factory, timm:NAME, torchvision:NAME, hf:NAME_OR_FOLDER, an .onnx or
        .pt2 file, or a folder.
    out
        The folder to write, or a file: small.onnx or small.pt2.
    recipe
        A YAML file with any of these flags as keys; flags win.
    """
    flags = {"model": model, **(choices or Choices()).flags(), **(source or Source()).flags()}
    keys = {} if recipe is None else recipes.read(recipe)
    chosen = recipes.merged(keys, flags, recipe or "")
    show.say("loading")
    from neuron_merging.folder import trust
    from neuron_merging.pipeline import OUTPUTS, analyse, compress_analysed, graph_of
    from neuron_merging.settings import from_recipe

    trust.check_file(recipe or "", keys, flags, source is not None and source.trust)
    settings = from_recipe(chosen)
    if chosen.output not in OUTPUTS:
        raise MergingError(f"unknown output {chosen.output!r}", where="--output", fix=f"Use {' or '.join(OUTPUTS)}.")
    if not chosen.dry_run:
        sources.check_target(chosen, out)
    network, inputs = sources.network(chosen, source)
    settings = sources.with_data(settings, chosen, network, inputs)
    with show.working("compressing"):
        network, inputs = graph_of(network, inputs) if chosen.output == "graph" else (network, inputs)
        analysis = analyse(network, inputs)
        small = compress_analysed(analysis, settings, pruned=True)
    result.finish(result.Result(analysis, small), result.resolved(chosen, settings), out)
