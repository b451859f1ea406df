"""What a model takes for its cache in a step: K and V pass through, and it hears whose they are."""

from torch import Tensor


class StepCache:
    """See layers.StoredLayers. What is not here, a model that asks for it cannot have."""

    is_compileable = False

    def __init__(self) -> None:
        self._updated: int | None = None

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self._updated = layer_idx
        return key, value

    def take(self) -> tuple[int, bool]:
        updated, self._updated = self._updated, None
        assert updated is not None, "a layer attends that has told its cache nothing"
        return updated, True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given; nothing counts on."""
        return 0
