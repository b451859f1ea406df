"""Whether an answer goes on with the last message of a chat.

continue_final_message    of the body, with add_generation_prompt: false (vLLM, SGLang)
prefix, partial           of the last message (DeepSeek and Mistral; Moonshot and Qwen)
"""

from services.router.dialects.body import Body

_OF_MESSAGES = ("prefix", "partial")


def read_continuing(body: Body) -> bool:
    """Raises InvalidParameter."""
    continues = body.flag("continue_final_message")
    begins = body.flag("add_generation_prompt")
    if begins and continues:
        raise body.wrong("add_generation_prompt", "must be false beside continue_final_message")
    continues = continues or _is_asked_by_messages(body)
    if body.get("add_generation_prompt") is False and not continues:
        raise body.wrong("add_generation_prompt", "must be true without continue_final_message")
    return continues


def _is_asked_by_messages(body: Body) -> bool:
    items = body.items("messages")
    if not any(isinstance(item, dict) and not item.keys().isdisjoint(_OF_MESSAGES) for item in items):
        return False
    messages = body.objects("messages")
    asking = [(message, name) for message in messages for name in _OF_MESSAGES if message.flag(name)]
    for message, name in asking:
        if message is not messages[-1]:
            raise message.wrong(name, "must be of the last message: an answer goes on with no other")
    return bool(asking)
