"""Random networks: a recipe is drawn from a seed and always builds the same network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from . import kinds as _kinds  # noqa: F401  (registers all kinds)
from .kinds.endings import ENDINGS
from .kinds.openings import OPENINGS
from .site import KINDS, WIDTHS, Site

EXTENT = {"image": 8, "signal": 8, "volume": 4, "tokens": 5, "features": 1}
WIDEST = 32


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a case. Each block has a seed of its own, so that any block can be left out."""

    seed: str
    opening: str
    width: int
    steps: tuple[tuple[str, int], ...]
    ending: str
    ratio: float = 0.5
    scope: str = "all"
    criterion: str = "l2"
    double: bool = True
    spice: bool = True

    @property
    def domain(self) -> str:
        return OPENINGS[self.opening][0]


@dataclass(frozen=True)
class BuiltNetwork:
    """A network, a function for its inputs, and the kinds of blocks that it contains."""

    model: nn.Module
    inputs: Callable[[int, int], tuple[Any, ...]]
    applied: tuple[str, ...]


class Network(nn.Module):
    """An opening, a chain of blocks, and an ending."""

    def __init__(self, opening: nn.Module, blocks: list[nn.Module], ending: nn.Module) -> None:
        super().__init__()
        self.opening, self.blocks, self.ending = opening, nn.ModuleList(blocks), ending

    def forward(self, *inputs: Any) -> Any:
        x = self.opening(*inputs)
        for block in self.blocks:
            x = block(x)
        return self.ending(x)


def draw_recipe(seed: int, index: int, deepest: int = 8) -> Recipe:
    """Draw case `index` of a run. The kinds take turns, so that all are used equally often."""
    rng = Random(f"{seed}:{index}")
    order = sorted(KINDS)
    Random(seed).shuffle(order)
    first = order[index % len(order)]
    domain = rng.choice(KINDS[first].domains)
    fitting = [name for name, kind in sorted(KINDS.items()) if domain in kind.domains]
    steps = [(name, rng.randrange(10**6)) for name in rng.choices(fitting, k=rng.randint(1, deepest - 1))]
    steps.insert(rng.randint(0, min(2, len(steps))), (first, rng.randrange(10**6)))
    return Recipe(
        seed=f"{seed}:{index}",
        opening=rng.choice([name for name, (where, _) in OPENINGS.items() if where == domain]),
        width=rng.choice(WIDTHS),
        steps=tuple(steps),
        ending=rng.choice([name for name, (where, _) in ENDINGS.items() if domain in where]),
        ratio=rng.choice([0.25, 0.5, 0.5, 0.75]),
        scope=rng.choice(["all", "all", "internal"]),
        criterion=rng.choice(["l2", "random"]),
        double=rng.random() < 0.8,
        spice=rng.random() < 0.8,
    )


def make_single_block_recipe(seed: int, index: int) -> Recipe:
    """Make a recipe with a single block between two layers."""
    name = sorted(KINDS)[index % len(KINDS)]
    rng = Random(f"{seed}:alone:{index}")
    domain = rng.choice(KINDS[name].domains)
    opening = next(name for name, (where, _) in OPENINGS.items() if where == domain)
    return Recipe(f"{seed}:{index}", opening, 8, ((name, 0),), "classes", spice=False)


def build_network(recipe: Recipe) -> BuiltNetwork:
    """Build the network of a recipe in evaluation mode, without blocks that the widths do not allow."""
    domain = recipe.domain
    site = Site(domain, recipe.width, EXTENT[domain], _seed_part(recipe, "opening"))
    opening = OPENINGS[recipe.opening][1](site)
    blocks, applied = [], []
    for name, number in recipe.steps:
        made = KINDS[name].make(Site(domain, site.width, site.size, _seed_part(recipe, number)))
        if made is not None and 1 <= made[1] <= WIDEST:
            blocks.append(made[0])
            applied.append(name)
            site = Site(domain, made[1], made[2] if len(made) == 3 else site.size, site.rng)
    ending = ENDINGS[recipe.ending][1](Site(domain, site.width, site.size, _seed_part(recipe, "ending")))
    model = Network(opening.module, blocks, ending)
    _randomise_statistics(model, _seed_part(recipe, "season"), recipe.spice)
    model = model.double() if recipe.double else model.float()
    return BuiltNetwork(model.eval(), opening.inputs, tuple(applied))


def _seed_part(recipe: Recipe, part: object) -> Random:
    rng = Random(f"{recipe.seed}/{part}")
    torch.manual_seed(rng.randrange(2**31))
    return rng


@torch.no_grad()
def _randomise_statistics(model: nn.Module, rng: Random, spice: bool) -> None:
    """Draw non-trivial norm statistics; with `spice`, make some filters zero or equal to others."""
    for module in model.modules():
        if getattr(module, "running_var", None) is not None:
            module.running_mean.normal_(0, 0.5)
            module.running_var.uniform_(0.3, 2)
        if isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
            for parameter in module.parameters(recurse=False):
                parameter.normal_(0.5, 0.7)
        if (
            spice
            and isinstance(module, (nn.Linear, nn.Conv2d))
            and "weight" in module._parameters
            and rng.random() < 0.2
        ):
            _duplicate_filters(module, rng)


def _duplicate_filters(module: nn.Module, rng: Random) -> None:
    """One filter becomes zero or a multiple of another."""
    one, other = rng.randrange(len(module.weight)), rng.randrange(len(module.weight))
    factor = rng.choice([0.0, 1.0, 0.5])
    for parameter in module.parameters(recurse=False):
        parameter[one] = parameter[other].clone() * factor


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Inputs with their floating tensors in another precision."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_tensors(item, dtype) for key, item in value.items()}
    return type(value)(cast_tensors(item, dtype) for item in value) if isinstance(value, (list, tuple)) else value
