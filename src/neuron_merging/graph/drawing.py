"""Tensors whose values are made when an operator reads them, and dropped behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, stand-ins have values: a network runs with weights of which one is there at a time.

    >>> drawing = Drawing()
    >>> ones = drawing.hold(torch.zeros(2), (3,), lambda: torch.ones(3))
    >>> with drawing:
    ...     ones + ones
    tensor([2., 2., 2.])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._makers: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    @property
    def count(self) -> int:
        """How many tensors are held so far."""
        return len(self._makers)

    def hold(self, like: Tensor, shape: tuple[int, ...], make: Callable[[], Tensor]) -> Tensor:
        """A stand-in of this shape that takes up no memory; outside it is not a number, so that none goes unseen."""
        memory = torch.full((), torch.nan, dtype=like.dtype, device=like.device)
        self._makers[_place(memory)] = memory, make
        return nn.Parameter(memory.expand(shape), requires_grad=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._made, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _made(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or _place(value) not in self._makers:
            return value
        like, make = self._makers[_place(value)]
        with self:  # what is made of stand-ins needs their values
            return make().to(like)


def _place(tensor: Tensor) -> int:
    """Where its values lie: what is detached from a stand-in stands for the same."""
    return tensor.untyped_storage().data_ptr()
