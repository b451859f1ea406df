import { stageSegments } from "../core/bars.js";
import { seconds } from "../core/format.js";
import { html } from "../vendor/htm-preact-3.1.1.module.js";
import { Bar } from "./bar.js";

const NAMED = 0.04; // of the whole: smaller ones are in the bar alone

// Where the time to the first token went.
export const StageBar = ({ placed }) => {
  const segments = stageSegments(placed.stages);
  const all = segments.map(({ label, amount }) => `${label} ${seconds(amount)}`).join(", ");
  return html`
    <${Bar} segments=${segments} whole=${placed.first_token_s} label=${`Time to the first token: ${all}`} />
    <p class="numbers">
      <span><b>${seconds(placed.first_token_s)}</b> first token</span>
      ${segments
        .filter(({ amount }) => amount >= NAMED * placed.first_token_s)
        .map(({ name, kind, label, amount }) => html`<span key=${name} data-kind=${kind}>${label} <b>${seconds(amount)}</b></span>`)}
    </p>
  `;
};
