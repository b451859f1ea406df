"""Of a small checkpoint that is to draft for another one: what config.json says of it. Pure."""

from collections.abc import Mapping
from typing import Any

from services.model.layer_groups import LayerGroups, layer_groups, text_config
from services.values.errors import ConfigError


def draft_groups(draft: Mapping[str, Any], target: Mapping[str, Any]) -> LayerGroups:
    """Its layers; all keep every token. Raises ConfigError where it cannot draft, or says too little."""
    groups, own, wanted = layer_groups(draft), _vocab_size(draft), _vocab_size(target)
    if own != wanted:
        raise ConfigError(f"the draft model's vocabulary has {own} ids, the model's {wanted}")
    if groups.recurrent is not None:
        raise ConfigError("a model with recurrent layers cannot draft: their states are of one position")
    return groups


def _vocab_size(config: Mapping[str, Any]) -> Any:
    return text_config(config).get("vocab_size")
