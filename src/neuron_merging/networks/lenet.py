"""LeNet-300-100: three fully connected layers for 28x28 images."""

import torch.nn.functional as F
from torch import Tensor, nn


class LeNet300100(nn.Module):
    """784-300-100-classes with ReLU; takes images of any shape that holds 784 numbers.

    >>> import torch
    >>> LeNet300100()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.ip1 = nn.Linear(28 * 28, 300)
        self.ip2 = nn.Linear(300, 100)
        self.ip3 = nn.Linear(100, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.ip1(images.flatten(1)))
        x = F.relu(self.ip2(x))
        logits: Tensor = self.ip3(x)
        return logits
