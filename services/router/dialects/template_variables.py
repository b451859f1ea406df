"""Whether and how hard to think, as variables that chat templates read."""

import json


def thinking_variables(thinks: bool | None, effort: str) -> str:
    """Chat's chat_template_kwargs. None and "": the template's own."""
    variables: dict[str, object] = {}
    if thinks is not None:
        variables = {"enable_thinking": thinks, "thinking": thinks}  # Qwen's and GLM's name; DeepSeek's
    if effort:
        variables["reasoning_effort"] = effort
    return json.dumps(variables) if variables else ""
