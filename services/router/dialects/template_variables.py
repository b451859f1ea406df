"""Chat templates read these variables: whether and how hard to think, and what a body names itself."""

from services.router.dialects.json_body import Body, json_text

_GIVEN = "chat_template_kwargs"


def read_variables(body: Body, thinks: bool | None, effort: str) -> str:
    """Return Chat's chat_template_kwargs. None and "" leave the template's own.

    What the body says of a variable by its name goes before what it says otherwise. Raises InvalidParameter.
    """
    variables: dict[str, object] = {}
    if thinks is not None:
        # The first name is Qwen's and GLM's, the second DeepSeek's.
        variables = {"enable_thinking": thinks, "thinking": thinks}
    if effort:
        variables["reasoning_effort"] = effort
    variables |= body.object(_GIVEN)
    return json_text(variables, body.name_of(_GIVEN)) if variables else ""
