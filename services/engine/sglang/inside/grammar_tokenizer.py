"""SGLang's grammars get a tokenizer where SGLang was started without one; nothing else does.

Without a tokenizer SGLang's GrammarManager creates no backend and ends every request with a grammar. The
router handles text, and a tokenizer in the other parts of SGLang would only take time at each token.
"""

import logging
from pathlib import Path
from typing import Any

from services.settings.tokenizer_file import tokenizer_of_file

log = logging.getLogger(__name__)


def give_tokenizer(manager: Any, scheduler: Any) -> None:
    """Give a GrammarManager that has started a backend, if it can use the model's tokenizer."""
    if manager.grammar_backend is not None:
        return
    try:
        manager.grammar_backend = _backend(scheduler)
    except Exception:  # The libraries of a tokenizer and of the backend may raise any exception.
        log.warning("sglang_grammars_missing effect=constraints_are_refused", exc_info=True)


def _backend(scheduler: Any) -> Any:
    from sglang.srt.constrained.base_grammar_backend import create_grammar_backend
    from sglang.srt.runtime_context import get_model, get_serving
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

    serving, model, config = get_serving(), get_model(), scheduler.model_config
    tokenizer = get_tokenizer(
        serving.tokenizer_path,
        tokenizer_mode=serving.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        tokenizer_backend=serving.tokenizer_backend,
    )
    return create_grammar_backend(
        scheduler.server_args,
        tokenizer_of_file(tokenizer, Path(serving.tokenizer_path)),  # It is built as the router's is.
        config.vocab_size,
        config.hf_eos_token_id,
        think_end_ids=config.think_end_ids,
    )
