// What is known of the cluster, from the events of its watch. Pure: a state and an event in, a state out.

import { foundAtDecode, placedOfFinish, rankName } from "./placed.js";

const SAMPLES = 60; // of each rank, one a second
const KEPT_REQUESTS = 100;
const GONE_FOR_S = 600; // a rank that does not come back is forgotten then

export const newCluster = () => ({
  ranks: {}, // by name: WORKER/RANK, whatever life of it
  running: [],
  finished: [], // newest first
  placed: {}, // by request id
  totals: { requests: 0, prompt: 0, found: 0, pulled: 0, reused: 0, moved: 0, saved: 0 },
  byRank: {}, // by name: prompt tokens of requests that ended there, and how many it had
  dropped: 0,
  degraded: "",
});

// `now`: Unix time, seconds. `isFirst`: of a connection; such an event names all ranks that there are.
export const applied = (cluster, event, now, isFirst) => {
  const finished = (event.finished ?? []).map(readFinished).filter((request) => !isKnown(cluster, request));
  const ids = new Set(finished.map(({ id }) => id));
  const before = cluster.finished.filter(({ id }) => !ids.has(id));
  const kept = [...finished.toReversed(), ...before].slice(0, KEPT_REQUESTS);
  return {
    ranks: withRanks(isFirst ? withoutThose(cluster.ranks, event, now) : cluster.ranks, event, now),
    running: (event.running ?? []).map(readRunning),
    finished: kept,
    placed: Object.fromEntries(kept.map((request) => [request.id, request])),
    totals: finished.reduce(addTotals, cluster.totals),
    byRank: finished.reduce(addByRank, cluster.byRank),
    dropped: Number(event.dropped ?? 0),
    degraded: event.degraded ?? "",
  };
};

// A client may give an id again when its request has ended.
const isKnown = ({ placed }, { id, endedAt }) => Object.hasOwn(placed, id) && placed[id].endedAt === endedAt;

// Once a second, whether events come or not: ranks that do not change send none.
export const ticked = (cluster, now) => ({
  ...cluster,
  ranks: Object.fromEntries(
    Object.entries(cluster.ranks)
      .filter(([, rank]) => rank.state !== "gone" || now - rank.goneAt < GONE_FOR_S)
      .map(([name, rank]) => [name, { ...rank, samples: [...rank.samples, busyOf(rank)].slice(-SAMPLES) }]),
  ),
});

const busyOf = ({ load }) => load.running + load.waiting;

// Those that went while nobody listened.
const withoutThose = (ranks, event, now) => {
  const there = new Set((event.ranks ?? []).map((status) => rankName(status.rank)));
  return Object.fromEntries(
    Object.entries(ranks).map(([name, rank]) => [name, there.has(name) ? rank : gone(rank, now)]),
  );
};

const gone = (rank, now) => ({ ...rank, state: "gone", goneAt: rank.goneAt ?? now, load: NO_LOAD });

const withRanks = (ranks, event, now) => {
  const next = { ...ranks };
  for (const id of event.gone ?? []) {
    const name = rankName(id);
    if (next[name]) next[name] = gone(next[name], now);
  }
  for (const status of event.ranks ?? []) {
    const rank = readRank(status);
    const before = next[rank.name];
    const isBack = before !== undefined && before.state !== "live" && rank.state === "live";
    next[rank.name] = { ...rank, samples: before?.samples ?? [], backAt: isBack ? now : before?.backAt };
  }
  return next;
};

const NO_LOAD = { running: 0, waiting: 0, free: 0, cached: 0, used: 0, quarantined: 0, total: 0, tokensPerS: 0 };

const readRank = (status) => ({
  name: rankName(status.rank),
  role: (status.role ?? "").replace("ROLE_", "").toLowerCase(),
  state: status.state ?? "",
  excluded: status.excluded ?? "",
  trust: Number(status.trust ?? 0),
  load: readLoad(status.load ?? {}),
});

const readLoad = (load) => {
  const number = (name) => Number(load[name] ?? 0);
  return {
    running: number("running"),
    waiting: number("waiting"),
    free: number("free_pages"),
    cached: number("cached_pages"),
    used: number("used_pages"),
    quarantined: number("quarantined_pages"),
    total: number("total_pages"),
    tokensPerS: tokensPerS(number),
  };
};

// That decoding sequences get together: each gets so many a step.
const tokensPerS = (number) =>
  number("step_s") > 0 ? (number("running") * Math.max(1, number("tokens_per_step"))) / number("step_s") : 0;

const readRunning = (request) => ({
  id: request.request_id ?? "",
  conversation: request.conversation_id ?? "",
  age_s: Number(request.age_s ?? 0),
  prompt: Number(request.prompt_tokens ?? 0),
  completion: Number(request.completion_tokens ?? 0),
  decode: rankName(request.decode),
  prefill: rankName(request.prefill),
  tenant: request.tenant ?? "",
});

const readFinished = (request) => ({
  id: request.request_id ?? "",
  conversation: request.conversation_id ?? "",
  outcome: request.outcome ?? "",
  endedAt: Number(request.ended_at_s ?? 0),
  duration_s: Number(request.duration_s ?? 0),
  placed: request.finish ? placedOfFinish(request.finish) : null,
  prices: (request.candidates ?? []).map(readCandidate),
  toolCalls: Number(request.tool_calls ?? 0),
  constraint: request.constraint ?? "",
  tenant: request.tenant ?? "",
});

const readCandidate = (candidate) => ({
  decode: rankName(candidate.decode),
  prefill: rankName(candidate.prefill),
  source: rankName(candidate.source),
  plan: (candidate.plan ?? "").replace("PLAN_", "").replace("UNSPECIFIED", "").toLowerCase(),
  found: Number(candidate.decode_hit_tokens ?? 0),
  reused: Number(candidate.prefill_hit_tokens ?? 0),
  terms: (candidate.terms ?? []).map((term) => ({ name: term.name ?? "", seconds: Number(term.seconds ?? 0) })),
  total_s: Number(candidate.total_s ?? 0),
  pinned: Boolean(candidate.pinned),
  chosen: Boolean(candidate.chosen),
  excluded: candidate.excluded ?? "",
});

const addTotals = (totals, { placed }) => {
  const usage = placed?.usage;
  if (!usage) return { ...totals, requests: totals.requests + 1 };
  return {
    requests: totals.requests + 1,
    prompt: totals.prompt + usage.prompt_tokens,
    found: totals.found + foundAtDecode(placed),
    pulled: totals.pulled + usage.pulled_tokens,
    reused: totals.reused + usage.reused_tokens,
    moved: totals.moved + usage.kv_bytes_moved,
    saved: totals.saved + usage.kv_bytes_saved,
  };
};

const addByRank = (byRank, { placed }) => {
  if (!placed?.usage.prompt_tokens) return byRank;
  const { prompt_tokens: prompt, prefill_prefix_len, pulled_tokens } = placed.usage;
  const reused = prefill_prefix_len - pulled_tokens;
  const next = { ...byRank, [placed.decode]: plus(byRank[placed.decode], prompt, foundAtDecode(placed)) };
  return placed.prefill ? { ...next, [placed.prefill]: plus(byRank[placed.prefill], prompt, reused) } : next;
};

const plus = (sum, prompt, had) => ({ prompt: (sum?.prompt ?? 0) + prompt, had: (sum?.had ?? 0) + had });
