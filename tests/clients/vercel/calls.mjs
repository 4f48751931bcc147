// Calls a server through the AI SDK and writes what the SDK returned as one JSON object: a result or an error by name.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, apiKey, name] = process.argv.slice(2);
const server = createOpenAICompatible({
  name: "ktqueue",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const options = { model: server(name), temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const prompt = "Tell me a story about a fox.";
const schema = z.strictObject({ sky: z.enum(["sunny", "cloudy", "rain"]), windy: z.boolean() });
const cities = [];
const tools = {
  weather: tool({
    description: "Return the weather of a city.",
    inputSchema: z.strictObject({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => {
      cities.push(city);
      return `It rains in ${city}.`;
    },
  }),
};
const providerOptions = { ktqueue: { parallel_tool_calls: false } };
const forced = { ...options, prompt, tools, providerOptions, toolChoice: "required" };

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

const checks = {
  async text() {
    const { text, usage, finishReason } = await generateText({ ...options, prompt, maxOutputTokens: 48 });
    return { text, outputTokens: usage.outputTokens, finishReason };
  },
  async streamed_text() {
    const result = streamText({ ...options, prompt, maxOutputTokens: 48, onError() {} });
    const parts = await all(result.textStream);
    const { outputTokens } = await result.usage;
    return { parts, outputTokens, finishReason: await result.finishReason };
  },
  async conversation() {
    const model = createOpenAI({ baseURL, apiKey })(name);
    const asked = { role: "user", content: prompt };
    const { response } = await generateText({ ...options, model, messages: [asked], maxOutputTokens: 16 });
    const messages = [asked, ...response.messages, asked];
    const { text, request } = await generateText({ ...options, model, messages, maxOutputTokens: 16 });
    const { input } = typeof request.body === "string" ? JSON.parse(request.body) : request.body;
    return { text, kinds: input.map((item) => item.type ?? item.role) };
  },
  async completion() {
    const model = server.completionModel(name);
    return (await generateText({ ...options, model, prompt: "Once upon a time", maxOutputTokens: 8 })).text;
  },
  async object() {
    return (await generateObject({ ...options, schema, prompt: "How is the weather?" })).object;
  },
  async choice() {
    return (await generateObject({ ...options, output: "enum", enum: ["sunny", "rain"], prompt })).object;
  },
  async list() {
    const element = z.enum(["sun", "rain"]);
    const output = Output.object({ schema: z.strictObject({ days: z.array(element).max(3) }) });
    return (await generateText({ ...options, output, prompt })).output;
  },
  async streamed_object() {
    const result = streamObject({ ...options, schema, prompt: "How is the weather?", onError() {} });
    const parts = await all(result.partialObjectStream);
    return { last: parts.at(-1), object: await result.object };
  },
  async tool() {
    cities.length = 0;
    const { toolCalls, toolResults, finishReason } = await generateText(forced);
    return { calls: toolCalls.map((call) => call.input), results: toolResults.map((result) => result.output), cities: [...cities], finishReason };
  },
  async named_tool() {
    const result = await generateText({ ...forced, toolChoice: { type: "tool", toolName: "weather" } });
    return { calls: result.toolCalls.map((call) => call.input) };
  },
  async streamed_tool() {
    cities.length = 0;
    const result = streamText({ ...forced, onError() {} });
    const parts = await all(result.fullStream);
    const pieces = parts.filter((part) => part.type === "tool-input-delta").map((part) => part.delta);
    const calls = parts.filter((part) => part.type === "tool-call").map((part) => part.input);
    return { pieces, calls, cities: [...cities], finishReason: await result.finishReason };
  },
  async agent() {
    cities.length = 0;
    const { text, steps } = await generateText({
      ...forced,
      maxOutputTokens: 100,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    return { text, steps: steps.map((step) => step.finishReason), cities: [...cities] };
  },
};

const results = {};
for (const [key, check] of Object.entries(checks)) {
  try {
    results[key] = { value: await check() };
  } catch (error) {
    results[key] = { error: String(error), body: error.responseBody ?? String(error.cause ?? "") };
  }
}
console.log(JSON.stringify(results));
