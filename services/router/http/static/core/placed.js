// What became of a request: where it ran, and where its prompt's KV came from. Pure.
//
// The feed tells it as protobuf's JSON (absent is 0, 64 bits are strings), the chat's last choice in `isthmus`.
// Both become the same here; `prices` is the feed's alone.

const PLANS = { PLAN_REMOTE: "remote", PLAN_LOCAL: "local" };

export const rankName = (rank) => (rank ? `${rank.worker ?? ""}/${rank.rank ?? 0}` : "");

const numbers = (message, names) => Object.fromEntries(names.map((name) => [name, Number(message?.[name] ?? 0)]));

const TOKENS = [
  "prompt_tokens",
  "completion_tokens",
  "reused_tokens",
  "computed_tokens",
  "decode_prefix_len",
  "delta_tokens",
  "prefill_prefix_len",
  "kv_bytes_moved",
  "kv_bytes_saved",
  "drafted_tokens",
  "accepted_draft_tokens",
  "pulled_tokens",
  "pulled_bytes",
];

export const STAGES = [
  "tokenize_s",
  "route_s",
  "router_queue_s",
  "decode_queue_s",
  "prefill_queue_s",
  "pull_s",
  "prefill_compute_s",
  "transfer_s",
  "first_decode_step_s",
  "relay_s",
];

// What decode itself had of the prompt: decode_prefix_len has what it pulled, too.
export const foundAtDecode = ({ plan, usage }) => usage.decode_prefix_len - (plan === "local" ? usage.pulled_tokens : 0);

// Of a Finish of the feed.
export const placedOfFinish = (finish) => ({
  plan: PLANS[finish.placement?.plan] ?? "",
  decode: rankName(finish.placement?.decode),
  prefill: rankName(finish.placement?.prefill),
  reason: finish.placement?.reason ?? "",
  predicted: Number(finish.placement?.predicted_prefix_len ?? 0),
  source: rankName(finish.placement?.source),
  route: (finish.placements ?? []).map((placement) => rankName(placement.decode)),
  ended: (finish.reason ?? "").replace("FINISH_REASON_", "").toLowerCase(),
  usage: numbers(finish.usage, TOKENS),
  stages: numbers(finish.stages, STAGES),
  first_token_s: Number(finish.stages?.first_token_s ?? 0),
});

// Of `isthmus` of a chat's last choice.
export const placedOfChoice = (own) => {
  return {
    plan: own.plan ?? "",
    decode: own.decode_rank ?? "",
    prefill: own.prefill_rank ?? "",
    reason: own.reason ?? "",
    predicted: own.predicted_prefix_len ?? 0,
    source: own.source_rank ?? "",
    route: (own.placements ?? []).map((placement) => placement.decode_rank),
    ended: own.finish_reason ?? "",
    usage: numbers({ ...own, ...own.placements?.[0] }, TOKENS),
    stages: numbers(own.stages, STAGES),
    first_token_s: Number(own.stages?.first_token_s ?? 0),
  };
};
