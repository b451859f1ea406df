"""More is known by these paths than which endpoint they are."""

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/generate"
HEALTH = "/health"
