import { html } from "../../vendor/htm-preact-3.1.1.module.js";
import { Ranks } from "./ranks.js";
import { Requests } from "./requests.js";
import { Totals } from "./totals.js";
import { Turns } from "./turns.js";

export const Cluster = ({ session, state, shownId, setShownId }) => {
  const own = state.turns.filter((turn) => turn.role === "assistant");
  const ids = new Set(own.map((turn) => turn.requestId));
  const { cluster } = state;
  return html`
    <section class="pane cluster" id="cluster" aria-label="Cluster">
      ${state.linkProblem && html`<p class="problem" role="alert">${sentenceOf(state)}</p>`}
      <${Totals} totals=${cluster.totals} />
      <${Ranks} cluster=${cluster} />
      <${Turns} answers=${own} cluster=${cluster} shownId=${shownId} setShownId=${setShownId} />
      <${Requests}
        session=${session}
        state=${state}
        running=${cluster.running.filter(({ id }) => !ids.has(id))}
        finished=${cluster.finished.filter(({ id }) => !ids.has(id))}
      />
    </section>
  `;
};

const sentenceOf = ({ link, linkProblem }) =>
  link === "missing" ? "This router has no live view: it is of an older version." : `No live view: ${linkProblem}`;
