"""The convolution that all networks of the paper are made of."""

from torch import nn


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, *, bias: bool = False) -> nn.Conv2d:
    """A square convolution with "same" padding and He initialisation.

    >>> convolution(3, 16, kernel=3)
    Conv2d(3, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
