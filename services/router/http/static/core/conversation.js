// A conversation: turns of the person, of tools and of the model. Pure.

import { placedOfChoice } from "./placed.js";

// What an answer is before anything of it has come.
export const newAnswer = (requestId) => ({
  role: "assistant",
  requestId,
  content: "",
  reasoning: "",
  calls: [],
  tokenIds: [],
  state: "waiting", // waiting, streaming, done, stopped or failed
  error: "",
  ended: "",
  placed: null,
});

// `chunk`: one of chat completions' stream.
export const grown = (answer, chunk) => {
  if (chunk.error) return { ...answer, state: "failed", error: chunk.error.message ?? "the stream failed" };
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  return {
    ...answer,
    state: answer.state === "waiting" && (delta.content || delta.reasoning_content) ? "streaming" : answer.state,
    content: answer.content + (delta.content ?? ""),
    reasoning: answer.reasoning + (delta.reasoning_content ?? ""),
    calls: (delta.tool_calls ?? []).reduce(withCall, answer.calls),
    tokenIds: choice?.token_ids?.length ? [...answer.tokenIds, ...choice.token_ids] : answer.tokenIds,
    ended: choice?.finish_reason ?? answer.ended,
    placed: chunk.isthmus ? placedOfChoice(chunk.isthmus) : answer.placed,
  };
};

const withCall = (calls, piece) => {
  const next = [...calls];
  const known = next[piece.index] ?? { id: "", name: "", args: "", result: null };
  next[piece.index] = {
    ...known,
    id: piece.id ?? known.id,
    name: piece.function?.name ?? known.name,
    args: known.args + (piece.function?.arguments ?? ""),
  };
  return next;
};

// The call of the last answer that has no result yet, if there is one: the person gives it next.
export const openCall = (turns) => {
  const last = turns.at(-1);
  if (last?.role !== "assistant" || last.state !== "done") return null;
  return last.calls.find((call) => call.result === null) ?? null;
};

export const withResult = (turns, callId, result) =>
  turns.map((turn) =>
    turn.role === "assistant"
      ? { ...turn, calls: turn.calls.map((call) => (call.id === callId ? { ...call, result } : call)) }
      : turn,
  );

const saysSomething = (turn) =>
  turn.role === "assistant" && turn.state !== "failed" && Boolean(turn.content || turn.reasoning || turn.calls.length);

// The messages of chat completions. Where no answer came, the question is left out as well: turns alternate.
export const messagesOf = (turns, system) => {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const [index, turn] of turns.entries()) {
    const answer = turns[index + 1];
    if (turn.role === "user" && (!answer || saysSomething(answer))) {
      messages.push({ role: "user", content: turn.content });
    } else if (saysSomething(turn)) {
      messages.push(messageOf(turn), ...resultsOf(turn));
    }
  }
  return messages;
};

// Plain text goes back as the ids that it was, which any router takes. Of thinking and calls the router that gave the
// answer puts the ids back itself, as far as the model's template shows them.
const messageOf = (answer) => {
  const called = answer.calls.filter((call) => call.result !== null);
  if (!called.length) {
    const ids = answer.tokenIds.length && !answer.reasoning ? { token_ids: answer.tokenIds } : {};
    return { role: "assistant", content: answer.content, ...ids };
  }
  return {
    role: "assistant",
    content: answer.content || null,
    tool_calls: called.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } })),
  };
};

const resultsOf = (answer) =>
  answer.calls
    .filter((call) => call.result !== null)
    .map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }));

// The body of a call for the next answer.
export const requestOf = (turns, settings, conversationId) => ({
  messages: messagesOf(turns, settings.system),
  conversation_id: conversationId,
  stream: true,
  return_token_ids: true,
  max_tokens: settings.maxTokens,
  ...(settings.temperature === "" ? {} : { temperature: Number(settings.temperature) }),
  ...(settings.thinks ? {} : { chat_template_kwargs: { enable_thinking: false } }),
  ...(settings.tools.trim() ? { tools: JSON.parse(settings.tools), tool_choice: settings.toolChoice } : {}),
});
