//! The unprivileged daemon and its client: the API, the agent loop, the model clients, the ledger. The only async crate.
//!
//! | module | what it holds |
//! |---|---|
//! | [`access`] | who may use what |
//! | [`agent`] | an agent's file |
//! | [`api`] | the HTTP API on the Unix socket |
//! | [`breaker`] | the circuit breaker: a tool that keeps failing is left alone for a while |
//! | [`call`] | one call, from arguments to receipt |
//! | [`caller`] | who asks, by the kernel's word |
//! | [`client`] | `agentctl` |
//! | [`clock`] | how long a job has run |
//! | [`conformance`] | the checks of `agentctl tools check` |
//! | [`daemon`] | the daemon's start and end |
//! | [`dispatcher`] | all jobs, as the API sees them |
//! | [`doctor`] | what this host can enforce |
//! | [`egress`] | letting calls out to the hosts that they list |
//! | [`feed`] | what those who watch a job see |
//! | [`guards`] | what stands between a call and its tool: places, breakers, retries, fallbacks |
//! | [`installation`] | everything that the configuration names |
//! | [`keys`] | the public keys that verify receipts |
//! | [`launch`] | what the loop needs of the launcher |
//! | [`launcher_link`] | the daemon's end of the launcher's protocol |
//! | [`ledger`] | what was acknowledged, on disk |
//! | [`model`] | who is asked what to do next |
//! | [`observe`] | what watches without taking part: audit log, metrics |
//! | [`outlines`] | what the plans of calls say about paths |
//! | `progress` | what a running tool says about how far it is |
//! | [`queue`] | whose job runs next |
//! | `redaction` | secrets are taken out of what leaves a call |
//! | [`retry`] | when a failed call is tried again |
//! | [`runner`] | one task per job |
//! | [`runtimes`] | whether what tools run on works |
//! | [`schema`] | JSON Schemas, compiled |
//! | [`session`] | a job's state, a fold over its events |
//! | [`spill`] | results that are too large for a conversation |
//! | [`sse`] | reading server-sent events |
//! | [`tools`] | the tools, with their schemas compiled |
//! | [`verification`] | receipts checked offline |

pub mod access;
pub mod agent;
pub mod api;
pub mod breaker;
pub mod call;
pub mod caller;
pub mod client;
pub mod clock;
pub mod conformance;
pub mod daemon;
pub mod dispatcher;
pub mod doctor;
pub mod egress;
pub mod extension;
pub mod feed;
pub mod guards;
pub mod installation;
pub mod keys;
pub mod launch;
pub mod launcher_link;
pub mod ledger;
pub mod model;
pub mod observe;
pub mod outlines;
mod progress;
pub mod queue;
mod redaction;
pub mod reload;
pub mod retry;
pub mod runner;
pub mod runtimes;
pub mod schema;
#[cfg(test)]
mod scripted;
pub mod session;
pub mod spill;
pub mod sse;
pub mod tools;
pub mod verification;
pub mod watchdog;
