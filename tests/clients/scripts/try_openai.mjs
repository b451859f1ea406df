// The same of npm's openai; module resolution finds it by NODE_PATH's folder, given as ISTHMUS_NODE.
import { createRequire } from "node:module";

const { OpenAI } = createRequire(process.env.ISTHMUS_NODE + "/package.json")("openai");
const model = process.env.ISTHMUS_MODEL;
const client = new OpenAI({ baseURL: process.env.ISTHMUS_URL + "/v1", apiKey: "none" });
const messages = [{ role: "user", content: "Is it warm in Corinth?" }];
const parameters = {
  type: "object",
  properties: { city: { enum: ["Corinth", "Athens"] }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};

function expect(holds, what) {
  if (!holds) throw new Error(what);
}

function isWeather(text) {
  const { city, unit } = JSON.parse(text);
  return ["Corinth", "Athens"].includes(city) && ["C", "F"].includes(unit);
}

const checks = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 8 });
    expect(answer.usage.completion_tokens <= 8, "usage");
  },
  async chat_stream() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true });
    let chunks = 0;
    for await (const _ of stream) chunks += 1;
    expect(chunks > 1, "chunks");
  },
  async tools() {
    const tools = [{ type: "function", function: { name: "weather", parameters } }];
    const stream = client.chat.completions.stream({
      model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 500,
    });
    const [call] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
    expect(isWeather(call.function.arguments), "arguments");
  },
  async json_schema() {
    const response_format = { type: "json_schema", json_schema: { name: "w", schema: parameters, strict: true } };
    const answer = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 500 });
    expect(isWeather(answer.choices[0].message.content), "content");
  },
  async responses() {
    const stream = client.responses.stream({ model, input: "Is it warm?", max_output_tokens: 8 });
    const answer = await stream.finalResponse();
    expect(answer.usage.output_tokens <= 8, "usage");
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.error(error);
    console.log(`FAILED ${name}`);
  }
}
process.exit(failed > 0 ? 1 : 0);
