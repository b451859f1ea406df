import { html } from "../../vendor/htm-preact-3.1.1.module.js";

const WIDTH = 60; // as many as samples are kept
const HEIGHT = 16;

// From 0 to the highest, the newest at the right.
export const Sparkline = ({ values, label }) => {
  const highest = Math.max(1, ...values);
  const points = values.map((value, index) => {
    const x = WIDTH - values.length + index;
    return `${x},${(HEIGHT - 1 - ((HEIGHT - 2) * value) / highest).toFixed(1)}`;
  });
  return html`
    <svg class="sparkline" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${label}>
      <polyline points=${points.join(" ")} />
    </svg>
  `;
};
