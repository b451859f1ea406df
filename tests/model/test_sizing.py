"""Pools against counting one token at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.model.model_config import Pool, kv_dtype
from services.values.errors import ConfigError


def test_the_type_is_the_whole_models_or_its_texts_or_refused(subtests):
    with subtests.test("the type is the whole models or its texts"):
        assert kv_dtype({"text_config": {}, "dtype": "float16"}) == "float16"
        assert kv_dtype({"text_config": {"torch_dtype": "bfloat16"}}) == "bfloat16"
    with subtests.test("a type nobody knows is refused"):
        with pytest.raises(ConfigError, match="int4"):
            kv_dtype({"dtype": "int4"})
        with pytest.raises(ConfigError, match="None"):
            kv_dtype({})


@given(st.integers(1, 64), st.integers(1, 300), st.integers(1, 50), st.integers(1, 8), st.integers(0, 2000))
def test_pools_hold_what_they_are_made_for(page_size, context_tokens, conversations, ranks, spare_bytes):
    pool = Pool(3, page_size, context_tokens)
    pages = pool.pages_for(conversations, ranks)
    assert pool.conversations_in(pages) * ranks >= conversations
    if pages > pool.conversation_pages:  # one page less on each rank is too little
        assert pool.conversations_in(pages - 1) * ranks < conversations
    taken = 0
    while taken * page_size < context_tokens:
        taken += 1
    assert pool.conversation_pages == taken
    assert pool.pages_in(pages * pool.page_bytes + spare_bytes % pool.page_bytes) == pages
