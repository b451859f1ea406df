"""A worker whose fake engine has the context and the vocabulary of a real model.

`python -m bench.router.rank --worker=prefill|decode` takes the flags of services.prefill and services.decode.
"""

import sys
from functools import partial

from bench.router.sizes import MAX_CONTEXT_TOKENS, VOCAB_SIZE
from services.decode.role import decode_roles
from services.engine import fake
from services.prefill.role import prefill_roles
from services.rank.main import main

# Where the engine is chosen it is looked up by this name; of itself it has 4,096 tokens and 512 ids.
vars(fake)["FakeRunner"] = partial(
    fake.FakeRunner, max_context_tokens=MAX_CONTEXT_TOKENS, vocab_size=VOCAB_SIZE
)

if __name__ == "__main__":
    main("bench.router.rank", decode_roles if "--worker=decode" in sys.argv else prefill_roles)
