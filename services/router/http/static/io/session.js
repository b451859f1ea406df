// The page's one state, and what changes it: a person, the chat's stream, the cluster's watch.

import { applied, newCluster, ticked } from "../core/cluster.js";
import { grown, newAnswer, openCall, requestOf, withResult } from "../core/conversation.js";
import { restored } from "../core/settings.js";
import { ApiError, chatChunks, modelNames } from "./api.js";
import { keepKey, keepSettings, keptKey, keptSettings, keptTheme, keepTheme, randomId } from "./kept.js";
import { follow } from "./watching.js";

const now = () => Date.now() / 1000;

export class Session {
  constructor() {
    this.state = {
      key: keptKey(),
      keyProblem: null, // null: none is asked for; a text: the form is shown with it
      theme: keptTheme(),
      settings: restored(keptSettings()),
      model: "",
      link: "connecting", // to the watch
      linkProblem: "",
      everybody: false,
      everybodyProblem: "",
      conversationId: randomId(),
      turns: [],
      cluster: newCluster(),
    };
    this._listeners = new Set();
    this._drawing = false;
    this._watching = new AbortController();
    this._asking = null;
    document.addEventListener("visibilitychange", () => this._draw());
  }

  listen(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  start() {
    this._watch();
    this._nameModel();
    setInterval(() => this._set({ cluster: ticked(this.state.cluster, now()) }), 1000);
  }

  // -- the key ------------------------------------------------------------------------------------------------

  async showKey(key) {
    try {
      await modelNames(key);
    } catch (error) {
      this._set({ keyProblem: error.message });
      return;
    }
    keepKey(key);
    this._set({ key, keyProblem: null });
    this._watch();
    this._nameModel();
  }

  askForKey() {
    this._set({ keyProblem: "" });
  }

  dismissKey() {
    this._set({ keyProblem: null });
  }

  forgetKey() {
    keepKey("");
    this.startOver();
    this._set({ key: "", keyProblem: "", cluster: newCluster() });
    this._watch();
  }

  // -- the chat -----------------------------------------------------------------------------------------------

  // What the person typed: a question, or what a call came to.
  say(text) {
    if (this._asking !== null) return;
    const call = openCall(this.state.turns);
    if (call === null) return void this._answer([...this.state.turns, { role: "user", content: text }]);
    const turns = withResult(this.state.turns, call.id, text);
    if (openCall(turns) === null) this._answer(turns);
    else this._set({ turns });
  }

  stop() {
    this._asking?.abort();
  }

  // The last question again, in place of an answer that failed.
  again() {
    if (this._asking === null && this.state.turns.at(-1)?.state === "failed") {
      this._answer(this.state.turns.slice(0, -1));
    }
  }

  startOver() {
    this.stop();
    this._asking = null;
    this._set({ turns: [], conversationId: randomId() });
  }

  setSettings(settings) {
    const watches = settings.tenant !== this.state.settings.tenant;
    keepSettings(settings);
    this._set({ settings });
    if (watches) this._watch();
  }

  setTheme(theme) {
    keepTheme(theme);
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    this._set({ theme });
  }

  setEverybody(everybody) {
    this._set({ everybody, everybodyProblem: "" });
    this._watch();
  }

  async _answer(turns) {
    const { settings, conversationId, key } = this.state;
    const asking = (this._asking = new AbortController());
    let answer = newAnswer(randomId());
    const show = (grownAnswer) => {
      answer = grownAnswer;
      // Another conversation may have begun.
      if (this._asking === asking) this._set({ turns: [...turns, answer] });
    };
    show(answer);
    try {
      const body = requestOf(turns, settings, conversationId);
      const { requestId } = answer;
      for await (const chunk of chatChunks(key, body, { requestId, tenant: settings.tenant, signal: asking.signal })) {
        show(chunk.request_id ? { ...answer, requestId: chunk.request_id } : grown(answer, chunk));
      }
      show(ended(answer));
    } catch (error) {
      this._ended(error, asking.signal.aborted, answer, show);
    }
    if (this._asking === asking) {
      this._asking = null;
      this._draw();
    }
  }

  _ended(error, isStopped, answer, show) {
    if (isStopped) return show({ ...answer, state: "stopped" });
    if (error instanceof ApiError && error.status === 401) this._set({ keyProblem: error.message });
    show({ ...answer, state: "failed", error: error.message });
  }

  // -- the cluster --------------------------------------------------------------------------------------------

  _watch() {
    this._watching.abort();
    const { signal } = (this._watching = new AbortController());
    const { key, everybody, settings } = this.state;
    const tell = (event, isFirst) => {
      if (!signal.aborted) this._set({ cluster: applied(this.state.cluster, event, now(), isFirst) });
    };
    const changed = (link, linkProblem) => {
      if (signal.aborted) return;
      if (link === "refused") this._set({ keyProblem: key ? linkProblem : "" });
      if (link === "forbidden" && everybody) return this._notEverybody(linkProblem);
      this._set({ link, linkProblem });
    };
    follow(key, { tenant: everybody ? "" : settings.tenant, everybody }, signal, tell, changed);
  }

  _notEverybody(linkProblem) {
    this.setEverybody(false);
    this._set({ everybodyProblem: linkProblem });
  }

  async _nameModel() {
    try {
      this._set({ model: (await modelNames(this.state.key))[0] ?? "" });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // the watch tells what is wrong
    }
  }

  // -- drawing ------------------------------------------------------------------------------------------------

  _set(changes) {
    this.state = { ...this.state, ...changes };
    this._draw();
  }

  // Once a frame, however much has come; nothing where nobody looks.
  _draw() {
    if (this._drawing || document.hidden) return;
    this._drawing = true;
    requestAnimationFrame(() => {
      this._drawing = false;
      for (const listener of this._listeners) listener(this.state);
    });
  }
}

const ended = (answer) =>
  answer.state === "failed"
    ? answer
    : answer.ended
      ? { ...answer, state: "done" }
      : { ...answer, state: "failed", error: "the connection was lost" };
