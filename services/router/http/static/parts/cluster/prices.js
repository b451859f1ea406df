import { termSegments } from "../../core/bars.js";
import { count, seconds } from "../../core/format.js";
import { html } from "../../vendor/htm-preact-3.1.1.module.js";
import { Bar } from "../bar.js";

const SHARE = 0.01; // of the dearest price: smaller terms are in the bar alone

// What the place was chosen from, cheapest first: docs/explain.md tells each term.
export const Prices = ({ placed, prices }) => {
  const dearest = Math.max(0, ...prices.map(({ total_s }) => total_s));
  return html`
    <div class="prices">
      ${placed?.reason && html`<p class="reason">Chosen: ${placed.reason}</p>`}
      ${prices.length === 0 && html`<p class="empty">The price list comes with the live view, when the request has ended.</p>`}
      <ol>
        ${prices.map((price, index) => html`<${Price} key=${index} price=${price} dearest=${dearest} />`)}
      </ol>
    </div>
  `;
};

const Price = ({ price, dearest }) => {
  const segments = termSegments(price.terms);
  return html`
    <li data-chosen=${String(price.chosen)} data-excluded=${String(Boolean(price.excluded))}>
      <span class="price-head">
        <span>${[price.prefill, price.decode].filter(Boolean).join(" → ")}</span>
        ${price.plan && html`<span class="plan">${price.plan}</span>`}
        ${price.pinned && html`<span class="plan" title="the conversation's last turn ran there">pinned</span>`}
        <b>${price.excluded ? price.excluded : `${price.chosen ? "✓ " : ""}${seconds(price.total_s)}`}</b>
      </span>
      ${!price.excluded &&
      html`
        <${Bar} segments=${segments.map(withKind)} whole=${dearest} label=${`${seconds(price.total_s)} in all`} size="thin" />
        <span class="numbers">
          <span>finds <b>${count(price.found)}</b></span>
          ${price.source && html`<span data-kind="pulled">pulls from <b>${price.source}</b></span>`}
          ${price.terms
            .filter((term) => Math.abs(term.seconds) >= SHARE * dearest)
            .map((term) => html`<span key=${term.name} data-kind=${kindOf(term.name)}>${term.name} <b>${signed(term.seconds)}</b></span>`)}
        </span>
      `}
    </li>
  `;
};

const signed = (s) => (s < 0 ? `−${seconds(-s)}` : seconds(s));

const KINDS = { compute: "computed", last_chunk: "moved", carried: "moved", pull: "pulled", bring: "pulled", wait_prefill: "waiting", wait_decode: "waiting" };
const kindOf = (name) => KINDS[name] ?? "router";
const withKind = (segment) => ({ ...segment, kind: kindOf(segment.name) });
