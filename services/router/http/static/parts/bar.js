import { html } from "../vendor/htm-preact-3.1.1.module.js";

// Segments side by side, as wide as they are much. What is said of them stands beside the bar.
// `whole`: of which they are parts, where that is more than their sum.
export const Bar = ({ segments, whole, label, size = "" }) => {
  const sum = Math.max(whole ?? 0, segments.reduce((total, { amount }) => total + amount, 0));
  return html`
    <div class=${`bar ${size}`} role="img" aria-label=${label}>
      ${segments.map(
        ({ kind, amount }, index) => html`
          <i key=${index} data-kind=${kind} style=${{ width: `${(100 * amount) / sum}%` }}></i>
        `,
      )}
    </div>
  `;
};
