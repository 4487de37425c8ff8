"""Networks of transformers: from a folder or the hub, with inputs that they take, and back into their format."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.cutting.plan import Plan
from neuron_merging.errors import ModelError, told
from neuron_merging.graph.copying import bare_copy
from neuron_merging.graph.quiet import hushed, quiet
from neuron_merging.graph.trees import flatten_outputs
from neuron_merging.graph.usercode import imported_module, nearest_names
from neuron_merging.networks import vision

PREFIX = "hf"
CONFIG = "config.json"
CODE = "trust_remote_code"
TASK = "task"
UNSET = ("n_inner", "intermediate_size", "ffn_dim", "head_dim")
"""Entries that follow from others where nothing is said."""
LENGTH, MOST_KEYS = 16, 6
"""Of an example of tokens; and entries of a configuration that a cut may change together."""


def hub_factory(name: str) -> Callable[..., nn.Module]:
    """What makes the network `hf:NAME`: with the head that its configuration names, or that of a task."""

    def make(**arg: Any) -> nn.Module:
        library = _library()
        task, code, fresh = arg.pop(TASK, None), bool(arg.pop(CODE, False)), bool(arg.pop("fresh", False))
        place: str | Path = Path(name) if Path(name).is_dir() else name
        config = library.AutoConfig.from_pretrained(place, trust_remote_code=code, **arg)
        kind = _kind(library, config, task)
        if fresh:
            network: nn.Module = (
                kind._from_config(config) if hasattr(kind, "_from_config") else kind.from_config(config)
            )
        else:
            network = kind.from_pretrained(place, config=config, **({CODE: True} if code else {}))
        return network.eval()

    return make


def _library() -> Any:
    vision.watch()
    return imported_module("transformers", "pip install 'neuron-merging[zoo]'.")


def _kind(library: Any, config: Any, task: str | None) -> Any:
    """The class of a network: for a task such as `sequence-classification`, or the one that was saved."""
    if task is not None:
        name = "AutoModelFor" + "".join(part.capitalize() for part in task.replace("-lm", "-l-m").split("-"))
        names = [entry for entry in dir(library) if entry.startswith("AutoModelFor")]
        by_letters = {entry.lower(): entry for entry in names}
        if name.lower() not in by_letters:
            what = f"transformers has no head for the task {task!r}"
            raise ModelError(what, where=f"--arg {TASK}=", fix=nearest_names(name, names))
        return getattr(library, by_letters[name.lower()])
    saved = (getattr(config, "architectures", None) or [None])[0]
    return getattr(library, saved, library.AutoModel) if saved else library.AutoModel


def takes(network: nn.Module) -> dict[str, Tensor]:
    """An example of what a network of transformers takes, by name."""
    config: Any = network.config
    pick = torch.Generator().manual_seed(0)
    main = str(getattr(network, "main_input_name", "input_ids"))
    if main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (1, int(getattr(config, "num_channels", 3)), int(height), int(width))
        return {main: torch.randn(shape, generator=pick).to(next(network.parameters()).dtype)}
    if main != "input_ids":
        raise ModelError(f"nothing says how long {main} are", where="--input", fix="Give a shape: --input 1,16000")
    text = getattr(config, "get_text_config", lambda: config)()
    words = torch.randint(int(text.vocab_size), (1, LENGTH), generator=pick)
    found = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    return {**found, "decoder_input_ids": words} if getattr(config, "is_encoder_decoder", False) else found


# Back into their format


def is_of_transformers(network: nn.Module) -> bool:
    """Whether it has a configuration as networks of transformers have it."""
    return hasattr(getattr(network, "config", None), "to_json_string")


def config_of(small: nn.Module, plan: Plan) -> Any:
    """The configuration from which transformers makes this network; None if there is none.

    Entries that are a size which the plan changes are tried with the new one. What comes of it must have the small
    network's tensors in their shapes, and with their values give the same answers bit for bit.
    """
    config: Any = getattr(small, "config", None)
    if not is_of_transformers(small) or plan.biases or plan.baked:
        return None
    changes = _changes(config, plan)
    for count in range(min(len(changes), MOST_KEYS) + 1):
        for keys in combinations(changes, count):
            for values in product(*(changes[key] for key in keys)):
                made = copy.deepcopy(config)
                for key, value in zip(keys, values, strict=True):
                    setattr(made, key, value)
                if _fits(type(small), made, small):
                    return made
    return None


def _changes(config: Any, plan: Plan) -> dict[str, list[int]]:
    """By entry of the configuration, the sizes that may have become of it; those that are the likeliest first."""
    pairs = {(cut.size, len(cut.kept)) for cut in plan.cuts} | {(c.size, len(c.kept)) for c in plan.groups}
    held = {key: value for key, value in vars(config).items() if type(value) is int and value > 1}
    sizes = {key: value for key, value in held.items() if not key.endswith(("_id", "layers", "layer"))}
    found = {key: {new for old, new in pairs if old == value} for key, value in sizes.items()}
    found |= {key: {new for _, new in pairs} for key, value in vars(config).items() if value is None and key in UNSET}
    heads = {key: value for key, value in sizes.items() if "head" in key}
    for key, value in heads.items():  # several heads of queries go with one of keys and values
        found[key] |= {value // old * new for old, new in pairs if value % old == 0}
    return {key: sorted(news) for key, news in found.items() if news}


def _fits(kind: type[nn.Module], config: Any, small: nn.Module) -> bool:
    """Whether a network of this configuration is the small one, given its values."""
    try:
        with quiet(), hushed(), torch.device("meta"):
            config = type(config).from_dict(config.to_dict())  # as it is read back: the library checks it then
            if _shapes(kind(config)) != _shapes(small):
                return False
        with quiet(), hushed(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            made = kind(config).to(next(small.parameters()).dtype).eval()
            made.load_state_dict(small.state_dict())
            inputs = takes(small)
            pairs = zip(*(flatten_outputs(net(**inputs)) for net in (made, bare_copy(small).eval())), strict=True)
            return all(torch.equal(a, b) for a, b in pairs)
    except Exception:  # noqa: BLE001 (whatever the library and the network's code say of such sizes)
        return False


def _shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def config_text(small: nn.Module, config: Any) -> str:
    """The file that `from_pretrained` reads."""
    named = copy.deepcopy(config)
    named.architectures = [type(small).__name__]
    try:
        text: str = named.to_json_string(use_diff=True)
    except TypeError as error:
        raise ModelError(f"the configuration cannot be written: {told(error)}", where=CONFIG) from error
    return text
