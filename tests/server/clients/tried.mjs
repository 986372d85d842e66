// Tries clients in JavaScript: `node tried.mjs [NAME ...]` in a folder with their packages:
// openai, ai, @ai-sdk/openai, @ai-sdk/openai-compatible, ollama-ai-provider-v2, ollama and zod.
// `serve_by_heart` must be running. Prints rows of the table of `tried.py`.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const HOST = "http://127.0.0.1:8059";
const OSLO = "What is the weather in Oslo?";
const BOTH = "And the weather in both?";
const FEATURES =
  "chat stream auto required parallel schema names system-later errors cancel".split(" ");
const LATER = [
  { role: "user", content: "Hi." },
  { role: "assistant", content: "Hello." },
  { role: "system", content: "Be brief." },
  { role: "user", content: "And now?" },
];
const CITY = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const PERSON = {
  type: "object",
  properties: { first: { type: "boolean" }, mood: { type: "boolean" } },
  required: ["first", "mood"],
  additionalProperties: false,
};

function check(found, why) {
  if (!found) throw new Error(`${why ?? "nothing"}`.slice(0, 200));
  return found;
}

function isPerson(value) {
  check(typeof value.first === "boolean" && typeof value.mood === "boolean", JSON.stringify(value));
}

async function refused(call, words) {
  let message = "not refused";
  try {
    await call();
  } catch (error) {
    message = `${error.message}`;
  }
  check(message.includes(words), message);
}

async function leaves(pieces, stop) {
  for await (const _ of pieces) break;
  await stop?.();
  for (let tried = 0; tried < 50; tried++) {
    const { data } = await (await fetch(`${HOST}/v1/sirchat/sessions`)).json();
    if (!data.some((one) => one.busy)) return;
    await new Promise((done) => setTimeout(done, 50));
  }
  throw new Error("the reply goes on");
}

async function all(pieces) {
  const found = [];
  for await (const piece of pieces) found.push(piece);
  return found;
}

async function openai() {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: `${HOST}/v1`, apiKey: "none" });
  const tools = [{ type: "function", function: { name: "weather", parameters: CITY } }];
  const create = (said, more) =>
    client.chat.completions.create({
      model: "tiny",
      messages: Array.isArray(said) ? said : [{ role: "user", content: said }],
      ...more,
    });
  const calls = async (text, more) =>
    check((await create(text, { tools, ...more })).choices[0].message.tool_calls);
  return {
    chat: async () => check((await create("Hi.")).choices[0].message.content),
    stream: async () => check((await all(await create("Hi.", { stream: true }))).length > 2),
    auto: async () => {
      const runner = client.chat.completions.runTools({
        model: "tiny",
        messages: [{ role: "user", content: OSLO }],
        tools: [
          {
            type: "function",
            function: {
              name: "weather",
              parameters: CITY,
              parse: JSON.parse,
              function: ({ city }) => `${city}: -3 degrees`,
            },
          },
        ],
      });
      check((await runner.finalContent()).includes("-3"));
    },
    required: () => calls(BOTH, { tool_choice: "required" }),
    parallel: async () => check((await calls(BOTH)).length === 2),
    schema: async () => {
      const schema = { name: "a", schema: PERSON, strict: true };
      const format = { type: "json_schema", json_schema: schema };
      const said = await client.chat.completions.parse({
        model: "tiny",
        messages: [{ role: "user", content: "Hi." }],
        response_format: format,
      });
      isPerson(JSON.parse(said.choices[0].message.content));
      const text = { format: { type: "json_schema", ...schema } };
      const response = await client.responses.parse({ model: "tiny", input: "Hi.", text });
      isPerson(response.output_parsed);
    },
    names: () => create([{ role: "user", content: "Hi.", name: "Anna" }]),
    "system-later": () => create(LATER),
    errors: () => refused(() => create("Hi.", { n: 3 }), "n can't be 3"),
    cancel: async () => {
      const stream = await create("Count.", { stream: true });
      await leaves(stream, () => stream.controller.abort());
    },
  };
}

async function sdk(kind) {
  const ai = await load("ai");
  let model;
  if (kind === "openai") {
    model = (await load("@ai-sdk/openai")).createOpenAI({ baseURL: `${HOST}/v1`, apiKey: "none" })("tiny");
  } else if (kind === "compatible") {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    const asked = { baseURL: `${HOST}/v1`, name: "own", supportsStructuredOutputs: true };
    model = createOpenAICompatible(asked)("tiny");
  } else {
    model = (await load("ollama-ai-provider-v2")).createOllama({ baseURL: `${HOST}/api` })("tiny");
  }
  const asked = { model, maxRetries: 0 };
  const weather = ai.tool({
    description: "The weather in a city.",
    inputSchema: ai.jsonSchema(CITY),
    execute: ({ city }) => `${city}: -3 degrees`,
  });
  const steps = { tools: { weather }, stopWhen: ai.stepCountIs(3) };
  const only = { tools: { weather: { ...weather, execute: undefined } } };
  const bad = { own: { n: 3 }, openai: { logprobs: 5 }, ollama: { think: true } };
  const words = { openai: "logprobs", compatible: "n can't be 3", ollama: "think can't be" };
  const features = {
    chat: async () => {
      const { text, response } = await ai.generateText({ ...asked, prompt: "Hi." });
      check(text);
      const messages = [{ role: "user", content: "Hi." }, ...response.messages];
      messages.push({ role: "user", content: "And now?" }); // a second turn
      check((await ai.generateText({ ...asked, messages })).text);
    },
    stream: async () => {
      const { textStream } = ai.streamText({ ...asked, prompt: "Hi." });
      check((await all(textStream)).length > 2);
    },
    auto: async () => check((await ai.generateText({ ...asked, ...steps, prompt: OSLO })).text.includes("-3")),
    parallel: async () =>
      check((await ai.generateText({ ...asked, ...only, prompt: BOTH })).toolCalls.length === 2),
    schema: async () => {
      const output = ai.Output.object({ schema: ai.jsonSchema(PERSON) });
      isPerson((await ai.generateText({ ...asked, output, prompt: "Hi." })).output);
    },
    "system-later": () =>
      ai.generateText({ ...asked, messages: LATER, allowSystemInMessages: true }),
    errors: () =>
      refused(
        () => ai.generateText({ ...asked, providerOptions: bad, prompt: "Hi." }),
        words[kind],
      ),
    cancel: async () => {
      const stop = new AbortController();
      const stream = ai.streamText({ ...asked, abortSignal: stop.signal, prompt: "Count." });
      await leaves(stream.textStream, () => stop.abort());
    },
  };
  if (kind !== "ollama") {
    features.required = async () => {
      const must = { ...only, toolChoice: "required" };
      check((await ai.generateText({ ...asked, ...must, prompt: BOTH })).toolCalls.length > 0);
    };
  }
  return features;
}

async function ollama() {
  const { Ollama } = await load("ollama");
  const client = new Ollama({ host: HOST });
  const chat = (said, more) =>
    client.chat({
      model: "tiny",
      messages: Array.isArray(said) ? said : [{ role: "user", content: said }],
      ...more,
    });
  const tools = [{ type: "function", function: { name: "weather", description: "", parameters: CITY } }];
  return {
    chat: async () => check((await chat("Hi.")).message.content),
    stream: async () => check((await all(await chat("Hi.", { stream: true }))).length > 2),
    auto: async () => check((await chat(OSLO, { tools })).message.tool_calls),
    parallel: async () => check((await chat(BOTH, { tools })).message.tool_calls.length === 2),
    schema: async () => isPerson(JSON.parse((await chat("Hi.", { format: PERSON })).message.content)),
    "system-later": () => chat(LATER),
    errors: () => refused(() => chat("Hi.", { options: { mirostat: 2 } }), "mirostat can't be 2"),
    cancel: async () => {
      const stream = await chat("Count.", { stream: true });
      await leaves(stream, () => stream.abort());
    },
  };
}

const CLIENTS = {
  "openai (JavaScript)": openai,
  "AI SDK @ai-sdk/openai": () => sdk("openai"),
  "AI SDK @ai-sdk/openai-compatible": () => sdk("compatible"),
  "AI SDK ollama-ai-provider-v2": () => sdk("ollama"),
  "ollama (JavaScript)": ollama,
};

for (const name of process.argv.length > 2 ? process.argv.slice(2) : Object.keys(CLIENTS)) {
  const features = await CLIENTS[name]();
  const cells = [];
  for (const feature of FEATURES) {
    let cell = "-";
    if (feature in features) {
      try {
        await features[feature]();
        cell = "yes";
      } catch (error) {
        cell = `no: ${`${error.message}`.slice(0, 200)}`.replaceAll("\n", " ");
      }
    }
    cells.push(cell);
  }
  console.log(`| ${name} | ${cells.join(" | ")} |`);
}
