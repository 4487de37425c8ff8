"""Labelled images from files: FashionMNIST, CIFAR-10, CIFAR-100, ImageNet, scikit-learn's digits.

>>> images = digits("test")
>>> next(images.batches(8))[0].shape
torch.Size([8, 1, 8, 8])
"""

from neuron_merging.data.arrays import Arrays as Arrays
from neuron_merging.data.embedded import digits as digits
from neuron_merging.data.folders import FolderImages as FolderImages
from neuron_merging.data.images import Images as Images
from neuron_merging.data.search import DATASETS as DATASETS
from neuron_merging.data.search import load as load
