/** A JSON value; integers beyond 2^53 arrive as strings of digits, and bigints are written as numbers. */
export type Json = null | boolean | number | bigint | string | Json[] | { [key: string]: Json | undefined };

/** An error that the caller is told: throw it from a handler. */
export class ToolError extends Error {
  /**
   * @param code the tool's own: 1 to 64 letters, digits, `_`, `-` and `.`
   * @param message read by the model: say what is wrong and what would work
   */
  constructor(
    code: string,
    message: string,
    options?: {
      /** The same call may work later. */
      retryable?: boolean;
      /** When, in milliseconds. */
      retryAfterMs?: number;
      details?: Json;
    },
  );
  readonly code: string;
  readonly retryable: boolean;
  readonly retryAfterMs?: number;
  readonly details?: Json;
}

/** What a handler knows about its call, and what it can do besides returning a result. */
export interface Context {
  readonly callId: string;
  readonly tool: string;
  /** Absolute path; also the working directory. Absent when the call has no workspace. */
  readonly workspace?: string;
  /** When the process is ended from outside. */
  readonly deadline: Date;
  readonly maxResponseBytes: number;
  /** The same for every repetition of the same call. */
  readonly idempotencyKey: string;
  readonly traceparent?: string;
  /** Milliseconds until the deadline, never less than 0. */
  remainingMs(): number;
  /** Names a file of the workspace, relative to it, that belongs to the result. */
  artifact(path: string, mediaType: string): void;
  /** Says how far the call is (0 to 1) and what it does. Never fails. */
  progress(share?: number, message?: string): void;
}

export interface Options {
  /** Merged into the answer to the operation `describe`. */
  describe?: { name?: string; version?: string; description?: string; input?: Json; output?: Json };
  /** Nothing when a call could work, else why not. Without it the operation is answered with UNSUPPORTED. */
  health?: () => string | null | undefined | Promise<string | null | undefined>;
}

/** Serves one request and ends the process. */
export function run<Arguments = any>(
  handler: (args: Arguments, context: Context) => Json | void | Promise<Json | void>,
  options?: Options,
): Promise<never>;
