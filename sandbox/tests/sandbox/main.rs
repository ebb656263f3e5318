//! Real sandboxes, looked at from inside and from outside. Needs root.
//!
//! `cargo test -p sandbox --test sandbox [PART OF A NAME]` runs the tests one after the other on the only thread.

mod confinement;
mod doctor;
mod frames;
mod harness;
mod lifecycle;
mod limits;
mod networks;
mod policies;
mod runtimes;
mod syscalls;

fn main() -> std::process::ExitCode {
    harness::run(&[
        || confinement::TESTS,
        || doctor::TESTS,
        || frames::TESTS,
        || lifecycle::TESTS,
        limits::selected,
        || networks::TESTS,
        || policies::TESTS,
        || runtimes::TESTS,
        || syscalls::TESTS,
    ])
}
