import { poolSegments } from "../../core/bars.js";
import { count, percent } from "../../core/format.js";
import { html } from "../../vendor/htm-preact-3.1.1.module.js";
import { Bar } from "../bar.js";
import { Sparkline } from "./sparkline.js";

const BACK_FOR_S = 15; // a rank that has come back is marked so
const ROLES = ["prefill", "decode"];

export const Ranks = ({ cluster }) => {
  const ranks = Object.values(cluster.ranks).sort(inOrder);
  return html`
    <section aria-label="Ranks">
      <div class="section-head">
        <h2>Ranks</h2>
        <p class="legend">
          <span data-kind="used">used</span><span data-kind="cached">cached</span><span data-kind="free">free pages</span>
        </p>
      </div>
      <div class="ranks" role="table" aria-label="Ranks">
        <div class="rank rank-head" role="row">
          ${["rank", "state", "KV pool", "hit rate", "running", "waiting", "tokens/s", "last minute"].map(
            (name) => html`<span key=${name} role="columnheader">${name}</span>`,
          )}
        </div>
        ${ranks.map((rank) => html`<${Rank} key=${rank.name} rank=${rank} had=${cluster.byRank[rank.name]} />`)}
        ${ranks.length === 0 && html`<p class="empty">No rank is known yet.</p>`}
      </div>
    </section>
  `;
};

const inOrder = (one, other) =>
  ROLES.indexOf(one.role) - ROLES.indexOf(other.role) || one.name.localeCompare(other.name, "en", { numeric: true });

const Rank = ({ rank, had }) => {
  const { load } = rank;
  const state = stateOf(rank);
  return html`
    <div class="rank" role="row" data-state=${state} data-rank=${rank.name}>
      <span role="cell" class="rank-name" title=${rank.name}>${rank.name}</span>
      <span role="cell" class="state" title=${rank.excluded}>${state}</span>
      <span role="cell" class="pool" title=${poolTitle(load)}>
        <${Bar} segments=${poolSegments(load)} whole=${load.total} label=${poolTitle(load)} />
      </span>
      <span role="cell" class="number" data-label="hit rate">${percent(had?.had ?? 0, had?.prompt ?? 0)}</span>
      <span role="cell" class="number" data-label="running">${count(load.running)}</span>
      <span role="cell" class="number" data-label="waiting">${count(load.waiting)}</span>
      <span role="cell" class="number" data-label="tokens/s">${rank.role === "decode" ? count(Math.round(load.tokensPerS)) : "–"}</span>
      <span role="cell" class="spark"><${Sparkline} values=${rank.samples} label="requests running and waiting, lately" /></span>
    </div>
  `;
};

const stateOf = (rank) => {
  const isBack = rank.state === "live" && rank.backAt && Date.now() / 1000 - rank.backAt < BACK_FOR_S;
  return isBack ? "back" : rank.state;
};

const poolTitle = ({ used, cached, free, quarantined, total }) => {
  const silent = quarantined ? `, ${count(quarantined)} quarantined` : "";
  return `${count(used)} pages used, ${count(cached)} cached, ${count(free)} free${silent}, of ${count(total)}`;
};
