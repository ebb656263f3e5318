import { readFileSync, writeSync } from "node:fs";

const request = JSON.parse(readFileSync(0, "utf8"));
const reply = { protocol: 1, call_id: request.call_id, ok: true, result: request.arguments };
const bytes = Buffer.from(JSON.stringify(reply), "utf8");
for (let written = 0; written < bytes.length; ) written += writeSync(1, bytes, written);
