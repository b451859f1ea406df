// The page: a chat on the left, on the right what the cluster does with it.

import { Session } from "./io/session.js";
import { Page } from "./parts/page.js";
import { html, render } from "./vendor/htm-preact-3.1.1.module.js";

const session = new Session();
render(html`<${Page} session=${session} />`, document.body);
session.start();
