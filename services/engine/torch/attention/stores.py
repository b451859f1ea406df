"""K and V of a step into their pages."""

from torch import Tensor

from services.engine.torch.attention.step_view import ReachView


def store(numbers: Tensor, pages: Tensor, view: ReachView) -> None:
    """`numbers` are the step's, [1, num_kv_heads, total, head_dim]; `pages` a layer's K or V."""
    of_tokens = numbers[0].transpose(0, 1)
    if view.stored is not None:
        of_tokens = of_tokens[view.stored]
    pages[view.token_pages, :, view.token_slots] = of_tokens
