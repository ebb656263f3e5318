//! The data that agentd, its tools and its clients exchange. Pure data: nothing here opens a file, a socket or a clock.
//!
//! | module | what it holds |
//! |---|---|
//! | [`ids`] | job, call and request ids: UUIDv7, printed as 26 base32 characters |
//! | [`code`] | the one list of failure codes, whose fault each is, and what to do about it |
//! | [`units`] | byte sizes and durations as people write them in files |
//! | [`digest`] | `sha256:…` and `blake3:…` values, canonical JSON |
//! | [`strict_json`] | the parser for bytes that a tool or a client wrote: duplicates, depth, offsets |
//! | [`manifest`] | `tool.toml`: the raw shape and the checked one |
//! | [`request`], [`reply`], [`progress`], [`introspection`] | tool protocol 1: what a tool reads and writes |
//! | [`receipt`] | what a call did: outcome, usage, changes, evidence, DSSE envelope |
//! | [`key_history`] | which keys signed receipts, and since when |
//! | [`job`] | what a client submits and what it gets back |
//! | [`api`] | the other bodies of the HTTP API: views, events, calls, exec |
//! | `schema` | JSON Schemas of what is text in JSON, with the feature of that name |
//! | [`framing`] | the frames of `POST /v1/exec` |

pub mod api;
pub mod code;
pub mod digest;
pub mod extension;
pub mod framing;
pub mod ids;
pub mod introspection;
pub mod job;
pub mod key_history;
pub mod manifest;
pub mod progress;
pub mod receipt;
pub mod reply;
pub mod request;
#[cfg(feature = "schema")]
pub mod schema;
pub mod source;
pub mod strict_json;
pub mod units;
