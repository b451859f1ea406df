// What bars are made of: segments in order, each with its kind and how much it is. Pure.

import { foundAtDecode } from "./placed.js";

// The prompt, from its first token to its last. Where decode's KV came from, and below it what was computed anew:
//
//   plan remote   |#### found ####|#### moved ####|       plan local   |#### found ####|## computed ##|
//                 |   reused   |##### computed ###|                    | reused        |## computed ##|
//
// Prefill's own prefix may end before decode's or behind it: it computes from there. Who computes may have pulled a
// part of that from another rank: |# found #|# pulled #|## computed ##|, and of what prefill reused likewise.

export const promptLanes = (placed) => {
  const { prompt_tokens: prompt, delta_tokens: moved, computed_tokens: computed, pulled_tokens: pulled } = placed.usage;
  const found = foundAtDecode(placed);
  const here =
    placed.plan === "remote"
      ? [segment("moved", moved)]
      : [segment("pulled", pulled), segment("computed", prompt - found - pulled)];
  const reused = prompt - computed - pulled;
  return {
    whole: prompt,
    came: present([segment("found", found), ...here]),
    computed: present([segment("reused", reused), segment("pulled", pulled), segment("computed", computed)]),
  };
};

// Stages by what they are to a reader: waiting is grey, computing and moving have the prompt's own colours.
const STAGE_KINDS = {
  tokenize_s: ["router", "tokenize"],
  route_s: ["router", "route"],
  router_queue_s: ["waiting", "wait at router"],
  decode_queue_s: ["waiting", "wait for decode"],
  prefill_queue_s: ["waiting", "wait for prefill"],
  pull_s: ["pulled", "pull"],
  prefill_compute_s: ["computed", "compute"],
  transfer_s: ["moved", "transfer"],
  first_decode_step_s: ["step", "first step"],
  relay_s: ["router", "relay"],
};

export const stageSegments = (stages) =>
  present(
    Object.entries(STAGE_KINDS).map(([name, [kind, label]]) => ({ ...segment(kind, stages[name]), name, label })),
  );

export const poolSegments = (load) =>
  present([
    segment("used", load.used),
    segment("cached", load.cached),
    segment("quarantined", load.quarantined),
    segment("free", load.free),
  ]);

// Terms of a price; what is below 0 is a gain and has no width.
export const termSegments = (terms) => present(terms.map(({ name, seconds }) => ({ ...segment(name, seconds), name })));

const segment = (kind, amount) => ({ kind, amount: Math.max(0, amount) });

const present = (segments) => segments.filter(({ amount }) => amount > 0);
