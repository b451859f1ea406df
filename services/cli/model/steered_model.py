"""A random model that likes some tokens and shuns others, wherever it is: for answers that come to an end.

Of a random model's logits none is higher than another's on the average, and these models have no bias. So one
dimension of what is between the layers is kept constant, and the output reads there how a token is liked:

    embeddings, dimension 0      the same for every token
    layers                       neither read nor write it
    output, dimension 0          the token's liking, in logits
"""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

_CONSTANT = 8.0  # about a third of what is beside it then, after the last norm
_WRITES = ("o_proj.weight", "down_proj.weight")
_READS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
_PROBED = 64  # tokens


def steer(model: PreTrainedModel, likings: Mapping[int, float]) -> None:
    """`likings`: logits to add, by token id; what they come to varies by a sixth. A logit's own spread is 3.

    Of dense attention models alone: it goes by the names of their weights.
    """
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if name.endswith(_WRITES):
            weight[0, :] = 0
        elif name.endswith(_READS):
            weight[:, 0] = 0
    model.get_input_embeddings().weight.detach()[:, 0] = _CONSTANT
    output = model.get_output_embeddings().weight.detach()
    output[:, 0] = 0
    constant = _constant_at_the_end(model)
    for token_id, liking in likings.items():
        output[token_id, 0] = liking / constant


def _constant_at_the_end(model: PreTrainedModel) -> float:
    vocab_size = model.config.vocab_size
    ids = torch.randint(0, vocab_size, (1, _PROBED), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state
    return float(hidden[0, :, 0].mean())
