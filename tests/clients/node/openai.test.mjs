// OpenAI's SDK for JavaScript.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const { FARTHING_URL, FARTHING_KEY, SMALL, LARGE } = process.env;
const client = new OpenAI({ baseURL: `${FARTHING_URL}/v1`, apiKey: FARTHING_KEY });
const messages = [{ role: "user", content: "Name three colours." }];
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Paris", "Oslo"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

test("chat, whole and streamed", async () => {
  const options = { model: SMALL, messages, max_tokens: 12, temperature: 0 };
  const whole = await client.chat.completions.create(options);
  const stream = await client.chat.completions.create({ ...options, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.ok(text);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("a tool that must be called", async () => {
  const question = [{ role: "user", content: "What is the weather in Paris?" }];
  const options = { model: LARGE, messages: question, tools: [weather], tool_choice: "required", max_tokens: 60, temperature: 0 };
  const [choice] = (await client.chat.completions.create(options)).choices;
  const [call] = choice.message.tool_calls;
  assert.equal(call.function.name, "weather");
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
});

test("two calls whose fragments come interleaved", async () => {
  const stream = client.chat.completions.stream({ model: "scripted", messages, tools: [weather] });
  const [choice] = (await stream.finalChatCompletion()).choices;
  assert.equal(choice.finish_reason, "tool_calls");
  const cities = choice.message.tool_calls.map((call) => JSON.parse(call.function.arguments).city);
  assert.deepEqual(cities, ["Paris", "Oslo"]);
});

test("embeddings without an encoding are 768 numbers", async () => {
  const found = await client.embeddings.create({ model: "scripted", input: "a farthing" });
  assert.equal(found.data[0].embedding.length, 768);
  assert.ok(Math.abs(found.data[0].embedding[384] - 0.5) < 1e-6);
});

test("text completions", async () => {
  const found = await client.completions.create({ model: SMALL, prompt: "One, two, three,", max_tokens: 8, temperature: 0 });
  assert.ok(found.choices[0].text);
});

test("responses, whole and streamed", async () => {
  const options = { model: SMALL, input: "Name three colours.", max_output_tokens: 16, temperature: 0 };
  assert.ok((await client.responses.create(options)).output_text);
  let text = "";
  for await (const event of await client.responses.create({ ...options, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.ok(text);
});

test("models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.ok(names.includes(SMALL) && names.includes(LARGE));
});

test("wrong requests", async () => {
  const wrong = new OpenAI({ baseURL: `${FARTHING_URL}/v1`, apiKey: "fk-wrong" });
  await assert.rejects(wrong.chat.completions.create({ model: SMALL, messages }), OpenAI.AuthenticationError);
  await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages }), OpenAI.NotFoundError);
});
