// Anthropic's SDK for JavaScript.
import Anthropic from "@anthropic-ai/sdk";
import assert from "node:assert/strict";
import { test } from "node:test";

const { FARTHING_URL, FARTHING_KEY, SMALL, LARGE } = process.env;
const client = new Anthropic({ baseURL: FARTHING_URL, apiKey: FARTHING_KEY });
const messages = [{ role: "user", content: "Name three colours." }];

test("a message, and as many tokens as were counted", async () => {
  const answer = await client.messages.create({ model: SMALL, max_tokens: 12, temperature: 0, messages });
  assert.ok(answer.content[0].text);
  const counted = await client.messages.countTokens({ model: SMALL, messages });
  const { input_tokens, cache_read_input_tokens, cache_creation_input_tokens } = answer.usage;
  assert.equal(input_tokens + cache_read_input_tokens + cache_creation_input_tokens, counted.input_tokens);
});

test("a stream", async () => {
  const stream = client.messages.stream({ model: SMALL, max_tokens: 12, temperature: 0, messages });
  let text = "";
  stream.on("text", (part) => (text += part));
  const final = await stream.finalMessage();
  assert.ok(text);
  assert.equal(final.content[0].text, text);
});

test("a tool that must be called", async () => {
  const schema = {
    type: "object",
    properties: { city: { enum: ["Paris", "Oslo"] } },
    required: ["city"],
    additionalProperties: false,
  };
  const answer = await client.messages.create({
    model: LARGE,
    max_tokens: 60,
    temperature: 0,
    messages: [{ role: "user", content: "What is the weather in Paris?" }],
    tools: [{ name: "weather", input_schema: schema }],
    tool_choice: { type: "tool", name: "weather" },
  });
  const call = answer.content.find((block) => block.type === "tool_use");
  assert.deepEqual(Object.keys(call.input), ["city"]);
});

test("wrong requests", async () => {
  const wrong = new Anthropic({ baseURL: FARTHING_URL, apiKey: "fk-wrong" });
  const asked = wrong.messages.create({ model: SMALL, max_tokens: 4, messages });
  await assert.rejects(asked, Anthropic.AuthenticationError);
});
