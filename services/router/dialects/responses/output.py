"""Parts of an answer as items of a response's output."""

from services.router.dialects.answer import Json
from services.router.dialects.parts import Kind, Part

_PREFIXES = {Kind.THINKING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
COMPLETED, IN_PROGRESS, INCOMPLETE = "completed", "in_progress", "incomplete"


def item_id(part: Part, stem: str) -> str:
    return f"{_PREFIXES[part.kind]}_{stem}{part.index}"


def item(part: Part, stem: str, status: str, answer_id: str = "") -> Json:
    """One in progress is empty yet. `answer_id` is what a client hands on with thinking: only the router
    reads it."""
    head = {"id": item_id(part, stem), "status": status}
    has_content = status != IN_PROGRESS
    match part.kind:
        case Kind.THINKING:
            content = [content_part(part)] if has_content else []
            handle = {"encrypted_content": answer_id} if answer_id else {}
            return {**head, "type": "reasoning", "summary": [], "content": content, **handle}
        case Kind.TEXT:
            content = [content_part(part)] if has_content else []
            return {**head, "type": "message", "role": "assistant", "content": content}
        case Kind.CALL:
            called = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {**head, "type": "function_call", **called}


def content_part(part: Part) -> Json:
    if part.kind is Kind.THINKING:
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
