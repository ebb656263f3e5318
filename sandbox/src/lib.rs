//! Everything privileged in agentd, synchronous and Linux only. The binary `agentd-launcher` is this library's only user
//! that runs as root; `agentd` uses its file formats, its catalogue and the client end of its protocol.
//!
//! Data flows one way: policy file → [`policy`] → plan → launch → outcome → evidence. The map, by what a reader looks for:
//!
//! | module | what it holds |
//! |---|---|
//! | [`config`] | `agentd.toml` |
//! | [`catalog`] | tools, runtimes and policies, read from directories that only root can write |
//! | [`host`] | what this kernel can enforce, probed by behaviour once |
//! | [`launch`] | from a plan to a running tool, and to its end |
//! | [`plan`] | everything one sandbox needs, decided before anything starts |
//! | [`listings`] | the names in directories of the host that policies look into |
//! | [`outline`] | what a plan says about a path, for denials that the failing tool itself names |
//! | [`policy`] | a policy file and the checked policy |
//! | `steps` | the child's steps between clone and exec, in their one order |
//! | `init` | PID 1 of each sandbox |
//! | [`cgroup`], `namespaces`, `mounts`, [`landlock`], [`seccomp`], `privileges`, `rlimits` | one mechanism each |
//! | [`file_identity`] | which file it is |
//! | [`frames`] | parts of roots that one call leaves to the next |
//! | [`egress`] | which hosts a call may be let out to |
//! | [`netns`] | a network of a call's own, with a place for each listed host |
//! | `denials` | refused system calls, by name |
//! | `descriptors` | what the processes of a launch pass to each other |
//! | [`workspace`] | tree digest, change lists, views of a workspace, the worker that runs as the caller |
//! | [`protocol`] | the messages between agentd and the launcher |
//! | [`launcher`] | the launcher's loop: grants, calls, the daemon, the sweep |
//! | [`log`] | the log of both processes, to stderr or the journal |
//! | [`doctor`] | what this host can enforce, found out by doing it |
//! | [`trusted`] | reading what only root can write |
//! | [`sys`] | the only unsafe code |

pub mod catalog;
pub mod cgroup;
pub mod config;
mod denials;
mod descriptors;
pub mod doctor;
pub mod egress;
pub mod file_identity;
pub mod frames;
pub mod host;
mod init;
pub mod landlock;
pub mod launch;
pub mod launcher;
pub mod listings;
pub mod log;
mod mounts;
mod namespaces;
pub mod netns;
pub mod outline;
pub mod plan;
pub mod policy;
mod privileges;
pub mod protocol;
mod rlimits;
pub mod seccomp;
mod steps;
pub mod sys;
pub mod trusted;
pub mod workspace;
