// Writes the report of one quarter. Speaks agentd's tool protocol without any library.

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, writeFileSync, writeSync } from "node:fs";
import { join } from "node:path";
import { chart } from "./chart";
import type { Figures } from "./figures";
import { page } from "./page";

type Arguments = { figures: Figures; earlier: Figures; summary: string };

/** Writes the files in order of their names and says what was written. */
function render(workspace: string, { figures, earlier, summary }: Arguments) {
  const svg = chart(figures, earlier);
  const contents: Record<string, string> = {
    "report/chart.svg": svg,
    "report/figures.json": `${JSON.stringify({ figures, earlier }, null, 2)}\n`,
    "report/report.html": page(figures, earlier, summary, svg),
  };
  mkdirSync(join(workspace, "report"), { recursive: true });
  const files = Object.entries(contents).map(([path, content]) => {
    const bytes = Buffer.from(content, "utf8");
    writeFileSync(join(workspace, path), bytes);
    return { path, bytes: bytes.length, sha256: createHash("sha256").update(bytes).digest("hex") };
  });
  const artifacts = [
    { path: "report/report.html", media_type: "text/html" },
    { path: "report/chart.svg", media_type: "image/svg+xml" },
    { path: "report/figures.json", media_type: "application/json" },
  ];
  return { ok: true, result: { files }, artifacts };
}

function answer(request: { operation: string; workspace: string; arguments: Arguments }) {
  if (request.operation !== "call") {
    const message = `operation ${request.operation} is not known`;
    return { ok: false, error: { code: "UNSUPPORTED", message, retryable: false } };
  }
  return render(request.workspace, request.arguments);
}

/** write(2) may take less than it is given. */
function writeAll(fd: number, bytes: Buffer) {
  for (let written = 0; written < bytes.length; ) written += writeSync(fd, bytes, written);
}

const request = JSON.parse(readFileSync(0, "utf8"));
const reply = answer(request);
writeAll(1, Buffer.from(JSON.stringify({ protocol: 1, call_id: request.call_id, ...reply }), "utf8"));
process.exitCode = reply.ok ? 0 : 1;
