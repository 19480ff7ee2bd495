// What a user of the openai package does, against any server: `node openai_script.mjs BASE_URL API_KEY MODEL`.
//
// Prints one JSON object, check -> what was seen: the same as openai_script.py prints, check by check.

import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const CHAT = {
  model,
  messages: [
    { role: "system", content: "Be brief." },
    { role: "user", content: "Name three colours." },
  ],
  temperature: 0,
  max_tokens: 8,
};
const PROMPT = { model, prompt: "Once upon a time", temperature: 0, max_tokens: 6 };
const REASONS = ["stop", "length"];

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 120_000 });
const create = (body) => client.chat.completions.create(body);

// The exception's class and what the server said of it.
async function failure(call) {
  try {
    await call();
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    return [error.constructor.name, error.status ?? null, error.param ?? null, error.code ?? null];
  }
  return "no error";
}

// A stream of one choice, put together.
async function read(stream) {
  let text = "";
  let role = null;
  const endings = [];
  const usages = [];
  for await (const chunk of stream) {
    if (chunk.usage) usages.push([chunk.choices.length, chunk.usage.total_tokens > 0]);
    for (const choice of chunk.choices) {
      text += (choice.delta ? choice.delta.content : choice.text) ?? "";
      role ??= choice.delta ? choice.delta.role : "none";
      endings.push(choice.finish_reason);
    }
  }
  const ended = REASONS.includes(endings.at(-1)) && endings.slice(0, -1).every((reason) => reason === null);
  return { text, ended, usages, role };
}

const content = async (body) => (await create(body)).choices[0].message.content;

const CHECKS = {
  async chat() {
    const answer = await create(CHAT);
    const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
    const [choice] = answer.choices;
    return [
      answer.object,
      choice.message.role,
      Boolean(choice.message.content),
      REASONS.includes(choice.finish_reason),
      prompt_tokens + completion_tokens === total_tokens,
    ];
  },
  async chat_stream() {
    const whole = await content(CHAT);
    const found = await read(await create({ ...CHAT, stream: true }));
    return [found.text === whole, found.ended, found.usages, found.role];
  },
  async chat_stream_usage() {
    return (await read(await create({ ...CHAT, stream: true, stream_options: { include_usage: true } }))).usages;
  },
  async chat_logprobs() {
    const [choice] = (await create({ ...CHAT, logprobs: true, top_logprobs: 2 })).choices;
    const tokens = choice.logprobs?.content ?? [];
    const fits = tokens.every((t) => t.logprob <= 0 && t.bytes !== null && t.top_logprobs.length <= 2);
    return [tokens.length > 0, fits];
  },
  async chat_n() {
    const answer = await create({ ...CHAT, n: 2 });
    const texts = new Set(answer.choices.map((choice) => choice.message.content));
    return [answer.choices.map((choice) => choice.index), texts.size];
  },
  async chat_parts() {
    const parts = [
      { type: "text", text: "Name three" },
      { type: "text", text: " colours." },
    ];
    const messages = [CHAT.messages[0], { role: "user", content: parts }];
    return (await content({ ...CHAT, messages })) === (await content(CHAT));
  },
  async chat_extensions() {
    return Boolean(await content({ ...CHAT, top_k: 5, min_p: 0.1, repetition_penalty: 1.1 }));
  },
  async chat_left_early() {
    for await (const _ of await create({ ...CHAT, stream: true })) break;
    return (await CHECKS.chat())[2];
  },
  async completion() {
    const answer = await client.completions.create(PROMPT);
    return [answer.object, Boolean(answer.choices[0].text), REASONS.includes(answer.choices[0].finish_reason)];
  },
  async completion_stream() {
    const whole = (await client.completions.create(PROMPT)).choices[0].text;
    const options = { stream: true, stream_options: { include_usage: true } };
    const found = await read(await client.completions.create({ ...PROMPT, ...options }));
    return [found.text === whole, found.ended, found.usages];
  },
  async completion_batch() {
    const answer = await client.completions.create({ ...PROMPT, prompt: ["One", "Two"], n: 2 });
    return answer.choices.map((choice) => choice.index);
  },
  async completion_tokens() {
    return (await client.completions.create({ ...PROMPT, prompt: [72, 105] })).choices.length > 0;
  },
  async completion_logprobs() {
    const { logprobs } = (await client.completions.create({ ...PROMPT, logprobs: 1 })).choices[0];
    return new Set([logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset].map((p) => p.length)).size === 1;
  },
  async models() {
    const ids = [];
    for await (const found of client.models.list()) ids.push(found.id);
    return [ids.includes(model), (await client.models.retrieve(model)).id === model];
  },
  async errors() {
    const stranger = client.withOptions({ apiKey: "nobody" });
    const calls = {
      key: () => stranger.models.list(),
      model: () => create({ ...CHAT, model: "no-such-model" }),
      model_id: () => client.models.retrieve("no/such-model"),
      range: () => create({ ...CHAT, temperature: -1 }),
      type: () => create({ ...CHAT, max_tokens: "many" }),
      unknown: () => create({ ...CHAT, no_such_field: 1 }),
      tools: () => create({ ...CHAT, tools: [{ type: "function", function: { name: "f" } }] }),
      format: () => create({ ...CHAT, response_format: { type: "json_object" } }),
      empty: () => client.completions.create({ ...PROMPT, prompt: "" }),
      stream: () => create({ ...CHAT, top_p: 2, stream: true }),
    };
    const found = {};
    for (const [name, call] of Object.entries(calls)) found[name] = await failure(call);
    return found;
  },
  async special_models() {
    const ids = [];
    for await (const found of client.models.list()) ids.push(found.id);
    const streamed = async (name) => read(await create({ ...CHAT, model: name, stream: true }));
    const calls = {
      breaks: () => failure(() => streamed("breaks")),
      full: () => failure(() => create({ ...CHAT, model: "full" })),
      slow: async () => (await streamed("slow")).ended,
    };
    const found = {};
    for (const [name, call] of Object.entries(calls)) if (ids.includes(name)) found[name] = await call();
    return found;
  },
};

const seen = {};
for (const [name, check] of Object.entries(CHECKS)) seen[name] = await check();
console.log(JSON.stringify(seen, null, 1));
