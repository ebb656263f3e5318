//! What shows from outside that agentd keeps its promises: a real daemon under test, a strict scripted model server, and
//! probes that run inside the sandbox.
//!
//! | module | what it holds |
//! |---|---|
//! | [`site`] | an installation in a temporary directory: configuration, tools, agents, workspaces |
//! | [`daemon`] | a real daemon on a site, by HTTP and by agentctl |
//! | [`leftovers`] | what a daemon must not leave: processes, cgroups, mounts |
//! | [`model_server`] | a model server that answers from a script and refuses what providers refuse |
//! | [`outside`] | what exists on the host for the probe to find |
//! | [`far_end`] | servers for calls that are let out to them |
//! | [`http_client`] | HTTP/1.1 over any stream |
//! | [`programs`] | the programs under test |
//! | [`python`] | Python environments with one package each |
//! | [`requirement`] | what a test needs of its host |
//! | [`zoo`] | tools that misbehave, and how a call of each must end |

pub mod daemon;
pub mod far_end;
pub mod http_client;
pub mod leftovers;
pub mod model_server;
pub mod outside;
pub mod programs;
pub mod python;
pub mod requirement;
pub mod site;
pub mod warm;
pub mod zoo;
