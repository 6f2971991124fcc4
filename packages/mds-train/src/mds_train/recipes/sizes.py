"""How large a recipe's model is."""

from __future__ import annotations

from mds_train.config.loading import Setting, build
from mds_train.config.schema import TrainConfig
from mds_train.recipes.catalogue import Recipe

__all__ = ["configuration_of", "parameters_of"]


def configuration_of(recipe: Recipe, *, store: str = "store") -> TrainConfig:
    """The recipe as a whole configuration on a store; ValueError if it contradicts itself."""
    chosen = Setting(value=store, origin="recipe")
    return build({**recipe.settings(), "data.store": chosen})


def parameters_of(recipe: Recipe) -> int:
    """Parameters of its model, over all ranks."""
    return configuration_of(recipe).model.num_params()
