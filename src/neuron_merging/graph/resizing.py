"""Networks whose sizes are data.

Code that says `x.view(b, 4, 16)` cannot be made to say 15. A network that is a file, or a captured graph, can: what
it holds as a constant is rewritten along with the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

Sizes = tuple[int | None, ...]
"""New sizes of an operator; None where the operator's own stays."""


class Resizable(nn.Module):
    """A network made of named steps, the sizes of which can be replaced.

    Every step is a module of its own, called once, so that its name is that of the operators that it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Mapping[str, Sizes] = {}


def size_key(step: str, kind: str) -> str:
    """The name of an operator's sizes.

    >>> size_key("/model.22/Reshape", "size")
    '/model.22/Reshape|size'
    """
    return f"{step}|{kind}"


def resized(own: Sequence[int], new: Sizes | None) -> list[int]:
    """An operator's own sizes, with the new ones in place.

    >>> resized([1, 64, -1], (None, 48, None))
    [1, 48, -1]
    """
    if new is None or len(new) != len(own):
        return list(own)
    return [a if b is None else b for a, b in zip(own, new, strict=True)]


class _Part(nn.Module):
    """What lies between the dots of a name."""


def register(root: nn.Module, name: str, what: nn.Module | Tensor) -> str:
    """Register something under its dotted name, or under one like it where that is taken; the name it got."""
    *parts, last = name.split(".") if all(name.split(".")) else [name.replace(".", "_")]
    home, path = root, ""
    for part in parts:
        found = home._modules.get(part)
        if found is None:
            part = _free(home, part)
            found = _Part()
            home.add_module(part, found)
        home, path = found, f"{path}{part}."
    last = _free(home, last)
    if isinstance(what, nn.Module):
        home.add_module(last, what)
    elif isinstance(what, nn.Parameter):
        home.register_parameter(last, what)
    else:
        home.register_buffer(last, what)
    return path + last


def _free(home: nn.Module, name: str) -> str:
    while hasattr(home, name):
        name += "_"
    return name
