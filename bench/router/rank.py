"""A worker whose fake engine has the context and the vocabulary of a real model.

`python -m bench.router.rank --worker=prefill|decode` takes the flags of services.prefill and services.decode.
"""

import sys
from typing import Any

from bench.router.sizes import MAX_CONTEXT_TOKENS, VOCAB_SIZE
from services.decode.decode_service import decode_roles
from services.engine import fake
from services.prefill.prefill_service import prefill_roles
from services.rank.main import main
from services.values.rank import Role


class LargeRunner(fake.FakeRunner):
    """FakeRunner alone has 4,096 tokens and 512 ids."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "max_context_tokens": MAX_CONTEXT_TOKENS, "vocab_size": VOCAB_SIZE})


# Where the engine is chosen it is looked up by this name.
vars(fake)["FakeRunner"] = LargeRunner

if __name__ == "__main__":
    decodes = "--worker=decode" in sys.argv
    main("bench.router.rank", {Role.DECODE: decode_roles} if decodes else {Role.PREFILL: prefill_roles})
