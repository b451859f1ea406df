// What a browser keeps: the key until its tab is closed, settings and the theme for longer. Storage may be forbidden;
// then nothing is kept, and the page works still.

const KEY = "isthmus.key";
const SETTINGS = "isthmus.settings";
const THEME = "isthmus.theme"; // theme.js reads it first

const read = (storage, name) => {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
};

const write = (storage, name, text) => {
  try {
    if (text === null) window[storage].removeItem(name);
    else window[storage].setItem(name, text);
  } catch {
    // Forbidden, or full.
  }
};

export const keptKey = () => read("sessionStorage", KEY) ?? "";
export const keepKey = (key) => write("sessionStorage", KEY, key || null);

export const keptSettings = () => {
  try {
    return JSON.parse(read("localStorage", SETTINGS));
  } catch {
    return null;
  }
};
export const keepSettings = (settings) => write("localStorage", SETTINGS, JSON.stringify(settings));

export const keptTheme = () => read("localStorage", THEME) ?? "system";
export const keepTheme = (theme) => write("localStorage", THEME, theme === "system" ? null : theme);

// Chance, without crypto.randomUUID: that is there with TLS and on this machine alone.
export const randomId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
