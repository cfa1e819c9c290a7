// Asks a server with the official client and prints what came back, as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "tiny";
const messages = [{ role: "user", content: "What is 12 + 7?" }];
const found = {};

found.models = (await client.models.list()).data.map((one) => one.id);
const whole = await client.chat.completions.create({ model, messages });
found.answer = whole.choices[0].message.content;
found.finish = whole.choices[0].finish_reason;

found.streamed = "";
const options = { include_usage: true };
const stream = await client.chat.completions.create({
  model,
  messages,
  stream: true,
  stream_options: options,
});
for await (const chunk of stream) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
  found.usage = chunk.usage?.completion_tokens ?? found.usage;
}
found.expectedUsage = whole.usage.completion_tokens;

const runner = client.chat.completions.stream({ model, messages });
found.helper = (await runner.finalChatCompletion()).choices[0].message.content;

found.response = (await client.responses.create({ model, input: "What is 12 + 7?" })).output_text;
found.responseStreamed = "";
for await (const event of await client.responses.create({ model, input: "What is 12 + 7?", stream: true })) {
  if (event.type === "response.output_text.delta") found.responseStreamed += event.delta;
}

try {
  await client.completions.create({ model, prompt: "x", suffix: "y" });
} catch (error) {
  found.error = { kind: error.constructor.name, status: error.status, param: error.param };
}
console.log(JSON.stringify(found));
