//! What a tool gets from a host that it may reach: bytes per second and latency, against the same program outside, with a direct
//! connection and through a CONNECT proxy.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::samples::{Samples, milliseconds};
use super::{Bench, Row, far_end, source};
use crate::process;

/// How often each way is tried; each time many connections are made.
const ROUNDS: usize = 7;
/// How many bytes are fetched each time.
const BYTES: usize = 512 << 20;
/// The name that the tool connects to.
const HOST: &str = "far-end.test";

/// What the program has measured on one way.
#[derive(Default)]
struct Way {
    connecting: Samples,
    round_trip: Samples,
    fetching: Samples,
}

/// Measures in turns.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    eprintln!("connections inside and outside, {ROUNDS} rounds");
    let (port, proxy) = (far_end::start()?, far_end::start_proxy()?);
    // The policy that agentd ships, and besides it this host's own server.
    let policy = format!(
        "version = 1\nname = \"far-end\"\nextends = \"network\"\nadhoc = true\nnetwork_allow = [\"127.0.0.1:{port}\"]\n"
    );
    fs::write(bench.staged.path("policies/far-end.toml"), policy)?;
    let daemon = bench.daemon("egress", &format!("[network.hosts]\n\"{HOST}\" = [\"127.0.0.1\"]\n"))?;
    let program = fs::read_to_string(source("connections.py"))?;
    let bytes = BYTES.to_string();
    let arguments = |host: &str, port: u16, through: &str| {
        ["-c", &program, host, &port.to_string(), &bytes, through].map(str::to_owned)
    };
    let (mut direct, mut proxied, mut inside) = <(Way, Way, Way)>::default();
    for _ in 0..ROUNDS {
        process::check_interrupt()?;
        let outside = |through: &str| {
            let mut command = Command::new("/usr/bin/python3");
            command.args(arguments("127.0.0.1", port, through));
            process::output(&mut command)
        };
        direct.add(&outside("")?)?;
        proxied.add(&outside(&proxy.to_string())?)?;
        let mut exec = daemon.agentctl(["exec", "--policy", "far-end", "--network"])?;
        exec.arg(format!("{HOST}:{port}")).args(["--timeout", "120s", "--", "/usr/bin/python3"]);
        inside.add(&process::output(exec.args(arguments(HOST, port, "")))?)?;
    }
    fs::remove_file(bench.staged.path("policies/far-end.toml"))?;
    let row = |what: &str, of: fn(&Way) -> &Samples| {
        let (ours, plain, by_proxy) = (of(&inside), of(&direct), of(&proxied));
        Row::new(
            format!("a tool's {what}"),
            format!("p50 {:.3} ms", milliseconds(ours.p50())),
            format!(
                "+{:.3} ms over a direct connection ({:.3} ms); {:.2} × through a CONNECT proxy ({:.3} ms)",
                milliseconds(ours.p50().saturating_sub(plain.p50())),
                milliseconds(plain.p50()),
                ours.times(by_proxy),
                milliseconds(by_proxy.p50())
            ),
        )
    };
    Ok(vec![
        Row::new(
            format!(
                "bytes per second that a tool fetches from a host that it may reach, {} MiB at a time",
                BYTES >> 20
            ),
            format!("{:.0} MiB/s", inside.rate()),
            format!(
                "{:.2} × a direct connection outside ({:.0} MiB/s), {:.2} × a CONNECT proxy outside ({:.0} MiB/s)",
                inside.rate() / direct.rate(),
                direct.rate(),
                inside.rate() / proxied.rate(),
                proxied.rate()
            ),
        ),
        row("new connection to it, with its name looked up and a first byte to and fro", |way| &way.connecting),
        row("byte to it and back on a connection that stands", |way| &way.round_trip),
    ])
}

impl Way {
    /// The program's three numbers, in milliseconds.
    fn add(&mut self, said: &str) -> Result<()> {
        let mut figures = said.split_whitespace().map(str::parse::<f64>);
        for samples in [&mut self.connecting, &mut self.round_trip, &mut self.fetching] {
            let figure =
                figures.next().context("the program said too little")?.context("the program said no number")?;
            samples.push(Duration::from_secs_f64(figure / 1e3));
        }
        Ok(())
    }

    /// MiB per second.
    fn rate(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
        let mebibytes = (BYTES >> 20) as f64;
        mebibytes / self.fetching.p50().as_secs_f64()
    }
}
