// Vercel's AI SDK with its provider for OpenAI-compatible addresses.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { test } from "node:test";
import { z } from "zod";

const { FARTHING_URL, FARTHING_KEY, SMALL, LARGE } = process.env;
const farthing = createOpenAICompatible({
  name: "farthing",
  baseURL: `${FARTHING_URL}/v1`,
  apiKey: FARTHING_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const prompt = "Name three colours.";

test("text, whole and streamed", async () => {
  const options = { model: farthing(SMALL), prompt, maxOutputTokens: 12, temperature: 0 };
  const whole = await generateText(options);
  const stream = streamText(options);
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.ok(text);
  assert.equal(text, whole.text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
});

test("a tool that must be called", async () => {
  const weather = tool({
    description: "What the weather is in a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Oslo"]) }),
    execute: async ({ city }) => `Sunny in ${city}.`,
  });
  const question = "What is the weather in Paris?";
  const options = { model: farthing(LARGE), prompt: question, tools: { weather }, maxOutputTokens: 60, temperature: 0 };
  const { toolCalls } = await generateText({ ...options, toolChoice: "required" });
  assert.equal(toolCalls[0].toolName, "weather");
  assert.deepEqual(Object.keys(toolCalls[0].input), ["city"]);
});

test("an object of a given form", async () => {
  const person = z.object({ name: z.string(), age: z.number().int() });
  const { output } = await generateText({
    model: farthing(LARGE),
    prompt: "Ada is 36 years old. Answer as JSON.",
    output: Output.object({ schema: person }),
    maxOutputTokens: 60,
    temperature: 0,
  });
  assert.equal(typeof output.name, "string");
});

test("embeddings", async () => {
  const { embeddings } = await embedMany({ model: farthing.embeddingModel("scripted"), values: ["one", "two"] });
  assert.deepEqual(embeddings.map((one) => one.length), [768, 768]);
});
