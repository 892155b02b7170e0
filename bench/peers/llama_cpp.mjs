// llama.cpp as a baseline of `twofour-bench generate --llama-cpp 'node bench/peers/llama_cpp.mjs MODEL.gguf --threads
// 2'`.
//
// Needs `npm install --ignore-scripts node-llama-cpp@3.22.1` in the folder it is started in (its prebuilt llama.cpp for
// x86-64). Models: `llama_cpp_model.py`.
//
// The first line it prints names the program. For each line {"prompt": P, "length": N} on stdin it reads P tokens in
// an empty context (prefill, until the first token is chosen), writes N more one by one (decode), and prints
// {"prefill_s": ..., "decode_s": ...}.
import { createRequire } from "node:module";
import path from "node:path";
import process from "node:process";
import readline from "node:readline";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { threads: { type: "string", default: "2" }, context: { type: "string", default: "1024" } },
});
const [file] = positionals;
const threads = Number(values.threads);
const here = createRequire(path.join(process.cwd(), "package.json"));
const library = await import(pathToFileURL(here.resolve("node-llama-cpp")));

const llama = await library.getLlama({ gpu: false, build: "never", maxThreads: threads, logLevel: "error" });
const model = await llama.loadModel({ modelPath: file });
const contextSize = Number(values.context);
const context = await model.createContext({ contextSize, batchSize: 512, threads });
const sequence = context.getSequence();

const release = await library.getModuleVersion();
console.log(JSON.stringify({
  contender: `llama.cpp ${path.basename(file, ".gguf").replace(/^.*-/, "").toUpperCase()}`,
  version: `llama.cpp ${llama.llamaCppRelease.release} by node-llama-cpp ${release}`,
  weight_bytes: model.size,
}));

const seconds = () => performance.now() / 1000;
for await (const line of readline.createInterface({ input: process.stdin })) {
  const { prompt, length } = JSON.parse(line);
  const tokens = Array.from({ length: prompt }, (_, index) => 300 + ((index * 7) % 20000));
  await sequence.clearHistory();
  const begun = seconds();
  let first = begun;
  let written = 0;
  for await (const _ of sequence.evaluate(tokens, { temperature: 0, yieldEogToken: true })) {
    if (written === 0) first = seconds();
    if (written === length) break;
    written += 1;
  }
  console.log(JSON.stringify({ prefill_s: first - begun, decode_s: seconds() - first }));
}
await model.dispose();
process.exit(0);
