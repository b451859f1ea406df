import { html } from "../vendor/htm-preact-3.1.1.module.js";

const LINKS = {
  connecting: "connecting",
  live: "live",
  lost: "connection lost",
  refused: "needs a key",
  forbidden: "not allowed",
  missing: "no live view",
};
const NEXT_THEME = { system: "light", light: "dark", dark: "system" };
const THEME_SIGNS = { system: "◐", light: "○", dark: "●" };

export const Header = ({ session, state }) => html`
  <header class="header">
    <h1><${Sign} />Isthmus</h1>
    <span class="served" title=${state.model}>${state.model}</span>
    <span class="link" data-link=${state.cluster.degraded ? "lost" : state.link} role="status" title=${state.linkProblem}>
      ${state.link === "live" && state.cluster.degraded ? `degraded: ${state.cluster.degraded}` : LINKS[state.link]}
    </span>
    <button class="quiet" type="button" onClick=${() => (state.key ? session.forgetKey() : session.askForKey())}>
      ${state.key ? "Forget key" : "API key"}
    </button>
    <button
      class="quiet sign"
      type="button"
      aria-label=${`Theme: ${state.theme}. Change`}
      title=${`Theme: ${state.theme}`}
      onClick=${() => session.setTheme(NEXT_THEME[state.theme] ?? "system")}
    >
      ${THEME_SIGNS[state.theme] ?? "◐"}
    </button>
  </header>
`;

const Sign = () => html`
  <svg viewBox="0 0 32 32" width="20" height="20" aria-hidden="true">
    <path class="land" d="M2 6h10v20H2zM20 6h10v20h-10z" />
    <path class="strait" d="M12 13h8v6h-8z" />
  </svg>
`;
