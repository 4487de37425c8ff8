"""Train a network, and fine-tune a compressed one."""

from neuron_merging.reproduction.training.train import TrainingResult, train
from neuron_merging.reproduction.training.training_recipe import TrainingRecipe

__all__ = ["TrainingRecipe", "TrainingResult", "train"]
