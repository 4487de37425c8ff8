"""Constants in the code that fix channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import LINE, case, refuse

refuse("slice literal", lambda: lambda x: x[:, :4], "x[:, :4]", out=4)
refuse("slice literals", lambda: lambda x: x[:, :4] + x[:, 4:], "x[:, :4] + x[:, 4:]", out=4)
refuse("select literal", lambda: lambda x: x * x[:, 5:6], "x * x[:, 5:6]")
refuse("narrow literal", lambda: lambda x: x.narrow(1, 2, 4), "x.narrow(1, 2, 4)", out=4)
refuse("split literal", lambda: lambda x: x.split(4, 1)[1], "x.split(4, 1)[1]", out=4)
refuse("split literals", lambda: lambda x: x.split([3, 5], 1)[1], "x.split([3, 5], 1)[1]", out=5)
refuse("index literal", lambda: lambda x: x[:, [7, 1, 4]], "x[:, [7, 1, 4]]", out=3)
refuse("every other channel", lambda: lambda x: x[:, ::2], "x[:, ::2]", out=4)
refuse("every channel but one", lambda: lambda x: x[:, 1:], "x[:, 1:]", out=7)
refuse("view literal", lambda: lambda x: x.view(2, 8, -1, 4), "x.view(2, 8, -1, 4)")
refuse("view literal halves", lambda: lambda x: x.view(-1, 4, 8, 8), "x.view(-1, 4, 8, 8)", out=4)
refuse("unflatten literal", lambda: lambda x: x.unflatten(1, (2, 4)).flatten(1, 2), "x.unflatten(1, (2, 4))")
refuse("mean over channels", lambda: lambda x: x - x.mean(1, keepdim=True), "x.mean(1, keepdim=True)")
refuse("sum over channels", lambda: lambda x: x * x.sum(1, keepdim=True), "x.sum(1, keepdim=True)")
refuse("cumsum over channels", lambda: lambda x: x.cumsum(1), "x.cumsum(1)")
refuse("sort over channels", lambda: lambda x: x.sort(1).values, "x.sort(1)")
refuse("max over channels", lambda: lambda x: x - x.max(1, keepdim=True).values, "x.max(1, keepdim=True)")
refuse("pool over channels", lambda: lambda x: F.max_pool1d(x.mT, 2).mT, "F.max_pool1d(x.mT, 2)", LINE, out=4)
refuse("one channel alone", lambda: lambda x: x[:, 2].unsqueeze(1) * x[:, :1], "x[:, 2]", out=1)
refuse("flatten all", lambda: lambda x: x.flatten().view(2, 8, 8, 8), "view", dead=False)
refuse("scaled by the size", lambda: lambda x: x * x.shape[1] ** -0.5, "x.shape[1] ** -0.5")
refuse("channel as a number", lambda: lambda x: x + torch.arange(x.shape[1]).view(-1, 1, 1), "torch.arange")


@case("index by a buffer", cut=("b.weight",), refused={"a": "x[:, self.order]"})
class IndexByBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.c(self.b(x[:, self.order]).relu())
