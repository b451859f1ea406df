"""These are the sizes of the model that is served in name."""

VOCAB_SIZE = 16_384
MAX_CONTEXT_TOKENS = 131_072
