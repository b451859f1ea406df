"""A model is refused for what it asks of attention and is not known: it would compute something else."""

from types import SimpleNamespace

import pytest
import torch

from engine.torch.attention.paging import empty, view_of
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.paged_attention import paged_attention
from services.engine.torch.attention.paged_kv import PageShape
from services.engine.torch.attention.step_view import Reach
from services.values.errors import ConfigError
from services.values.kv import GroupKind
from services.values.request import SamplingParams

SLIDING = Reach(0, GroupKind.SLIDING_WINDOW, 8)
numbers = torch.ones(1, 2, 3, 4)


def attend(*, module=None, mask=None, reach=Reach(0), **asked):  # noqa: B008
    kv = empty(PageShape(2, 2, 4, 4, 4))
    chunks = [Chunk(range(3), 0, [0], sample=False, sampling=SamplingParams())]
    view = view_of(kv, chunks, None, reach)
    module = module or SimpleNamespace()
    return paged_attention(module, numbers, numbers, numbers, mask, scaling=1.0, paged=view, **asked)


def test_what_is_not_known_is_refused_and_what_says_nothing_new_passes(subtests):
    for asked, named in [
        ({"position_bias": torch.ones(2)}, "position_bias"),
        ({"indices": torch.ones(2), "block_indices": 3}, "block_indices, indices"),
        ({"cu_seq_lens_q": torch.ones(2)}, "cu_seq_lens_q"),
        ({"is_causal": False}, "is_causal=False"),
        ({"module": SimpleNamespace(is_causal=False)}, "is_causal=False"),
        ({"mask": torch.ones(1, 1, 3, 3)}, "attention_mask"),
        ({"sliding_window": 8}, "a window of 8 tokens"),
        ({"sliding_window": 9, "reach": SLIDING}, "a window of 9 tokens"),
    ]:
        with (
            subtests.test("what is not known is not ignored", asked=asked),
            pytest.raises(ConfigError, match=named),
        ):
            attend(**asked)
    for asked in [
        {"dropout": 0.0, "position_ids": torch.ones(3), "use_cache": False, "output_attentions": False},
        {"position_bias": None, "s_aux": None, "softcap": None, "is_causal": True},
        {"sliding_window": 8, "reach": SLIDING},
        {"sliding_window": None, "reach": SLIDING},  # where the model's own mask would say it
        {"module": SimpleNamespace(is_causal=True)},
    ]:
        with subtests.test("what says nothing new passes", asked=asked):
            output, _ = attend(**asked)
            assert output.shape == (1, 3, 2, 4)
