// What a person may set, and what is wrong with it. Pure.

export const DEFAULTS = {
  system: "",
  temperature: "", // empty: as the model says
  maxTokens: 512,
  thinks: true,
  tools: "", // JSON
  toolChoice: "auto",
  tenant: "",
};

export const EXAMPLE_TOOLS = JSON.stringify(
  [
    {
      type: "function",
      function: {
        name: "weather",
        description: "The weather in a city",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
  null,
  1,
);

// By name, a sentence each; none: they can be used.
export const problemsOf = (settings) => {
  const problems = {};
  const { temperature, maxTokens, tools } = settings;
  if (temperature !== "" && !(Number(temperature) >= 0 && Number(temperature) <= 2)) {
    problems.temperature = "a number from 0 to 2, or empty";
  }
  if (!(Number.isInteger(maxTokens) && maxTokens >= 1)) problems.maxTokens = "a whole number, 1 or more";
  if (tools.trim() && !isList(tools)) problems.tools = "a JSON list of tools, or empty";
  return problems;
};

const isList = (text) => {
  try {
    return Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
};

// What was kept may be of another version: fields of the wrong type are as by default.
export const restored = (kept) =>
  Object.fromEntries(
    Object.entries(DEFAULTS).map(([name, value]) => [name, typeof kept?.[name] === typeof value ? kept[name] : value]),
  );
