"""A request may come to the end of a decode rank's pool. Pure."""

from services.values.request import FinishReason


def length_means(
    *, num_tokens: int, output_tokens: int, max_tokens: int | None, model_tokens: int, longest_tokens: int
) -> FinishReason | None:
    """Return what it is for the client that a decode rank ended its request with LENGTH.

    It is None where another rank holds more. `num_tokens` are the prompt's and the output's together,
    `longest_tokens` what the roomiest rank holds, `model_tokens` the model's context.
    """
    if num_tokens >= model_tokens or (max_tokens is not None and output_tokens >= max_tokens):
        return FinishReason.LENGTH
    return FinishReason.CAPACITY if num_tokens >= longest_tokens else None
