"""training: train a network and fine-tune a compressed one."""

from neuron_merging.training.settings import TrainingRecipe
from neuron_merging.training.train import Trained, train

__all__ = ["Trained", "TrainingRecipe", "train"]
