"""The user's data: images in folders, and arrays in .npz or .safetensors files."""

from neuron_merging.data.images import Images
from neuron_merging.data.user_files import Arrays, FolderImages
from neuron_merging.errors import make_deprecated_getattr

__all__ = ["Arrays", "FolderImages", "Images"]

__getattr__ = make_deprecated_getattr(
    __name__,
    {
        "load": "neuron_merging.reproduction.datasets:load_dataset",
        "digits": "neuron_merging.reproduction.datasets:load_digits",
    },
)
