import { bytes, count, percent } from "../../core/format.js";
import { html } from "../../vendor/htm-preact-3.1.1.module.js";

// Of the requests that have ended since this page was opened.
export const Totals = ({ totals }) => html`
  <dl class="totals" aria-label="Totals since this page was opened">
    <${Total} name="Hit rate" title="prompt tokens found on the decode rank, of all" value=${percent(totals.found, totals.prompt)} kind="found" />
    <${Total} name="KV saved" title="bytes that moving whole prompts would have cost beyond those moved" value=${bytes(totals.saved)} kind="found" />
    <${Total} name="KV moved" title="bytes that crossed from prefill to decode" value=${bytes(totals.moved)} kind="moved" />
    ${totals.pulled > 0 &&
    html`<${Total} name="Pulled" title="prompt tokens that who computed the rest got from another rank" value=${count(totals.pulled)} kind="pulled" />`}
    <${Total} name="Requests" title="ended since this page was opened" value=${count(totals.requests)} />
  </dl>
`;

const Total = ({ name, title, value, kind }) => html`
  <div title=${title} data-kind=${kind}>
    <dt>${name}</dt>
    <dd>${value}</dd>
  </div>
`;
