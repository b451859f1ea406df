// Numbers as people read them. Pure.

const WHOLE = new Intl.NumberFormat("en-US");
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const count = (number) => WHOLE.format(number);

export const bytes = (number) => {
  let unit = 0;
  while (number >= 1024 && unit < BYTE_UNITS.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? number : number.toFixed(number < 100 ? 1 : 0)} ${BYTE_UNITS[unit]}`;
};

export const seconds = (s) => {
  if (s >= 60) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s >= 1) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  const ms = s * 1000;
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
};

// 0 of 0 is not known.
export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)}%` : "–");

export const ago = (s) => {
  if (s < 1) return "now";
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  return `${Math.floor(s / 3600)} h ago`;
};

// What stands between lines of three backticks or tildes, and what does not, in order. Of an answer that is still
// being written the last code may have no end yet.
export const codeApart = (text) => {
  const pieces = [];
  let fence = null;
  let lines = [];
  const end = () => {
    if (lines.length > 0) pieces.push({ isCode: fence !== null, text: lines.join("\n") });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const [, mark, rest] = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line) ?? [];
    const opens = mark !== undefined && fence === null && !(mark[0] === "`" && rest.includes("`"));
    const closes = mark !== undefined && fence !== null && mark.startsWith(fence) && rest.trim() === "";
    if (opens || closes) {
      end();
      fence = opens ? mark : null;
    } else {
      lines.push(line);
    }
  }
  end();
  return pieces;
};

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
