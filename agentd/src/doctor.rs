//! `agentd doctor`: what this host can enforce, for people and as JSON.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use sandbox::catalog::Catalog;
use sandbox::config::{Config, FILE_NAME};
use sandbox::doctor::{Finding, Report, examine};
use sandbox::trusted::Owners;
use toolproto::source::FileError;

/// The configuration is wrong, or the caller is not root.
const UNUSABLE: u8 = 2;

/// Examines the host and prints what was found. Exit status 0 when everything is there that the policies and the configured
/// tools require, 1 when something is missing, 2 when nothing could be tried.
///
/// The process must have one thread: probes fork.
#[must_use]
pub fn run(config_dir: &Path, as_json: bool) -> ExitCode {
    if !rustix::process::geteuid().is_root() {
        eprintln!("agentd doctor must be run as root: it tries what the launcher does");
        return ExitCode::from(UNUSABLE);
    }
    let (config, catalog) = match load(config_dir) {
        Ok(loaded) => loaded,
        Err(errors) => {
            errors.iter().for_each(|error| eprintln!("{error}"));
            return ExitCode::from(UNUSABLE);
        }
    };
    let report = examine(&config, &catalog);
    if as_json {
        match serde_json::to_string_pretty(&report) {
            Ok(json) => println!("{json}"),
            Err(error) => {
                eprintln!("the report has no JSON form: {error}");
                return ExitCode::from(UNUSABLE);
            }
        }
    } else {
        print!("{}", render(&report));
    }
    if report.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A host that has no configuration yet is examined with the defaults: that is when a doctor is asked first.
fn load(config_dir: &Path) -> Result<(Config, Catalog), Vec<FileError>> {
    let file = std::path::absolute(config_dir).unwrap_or_else(|_| config_dir.to_owned()).join(FILE_NAME);
    let config = if file.exists() { Config::load(config_dir) } else { Config::parse(&file, "version = 1\n") };
    let config = config.map_err(|error| vec![error])?;
    let catalog = Catalog::load(&config, Owners::RootOnly)?;
    Ok((config, catalog))
}

fn render(report: &Report) -> String {
    let width = report.findings.iter().map(|finding| finding.name.len()).max().unwrap_or_default();
    let mut text = String::new();
    for finding in &report.findings {
        line(&mut text, finding, width);
    }
    text.push('\n');
    if report.policies.is_empty() {
        text.push_str("No policies are configured.\n");
    }
    for policy in &report.policies {
        if policy.enforceable {
            push(&mut text, format_args!("policy {}: can be enforced\n", policy.name));
        } else {
            push(
                &mut text,
                format_args!(
                    "policy {}: cannot be enforced; its calls run under --limits best-effort only\n",
                    policy.name
                ),
            );
        }
        for missing in &policy.missing {
            push(&mut text, format_args!("    lacks {missing}\n"));
        }
    }
    let verdict = if report.ok {
        "Everything is there that the policies and the configured tools require."
    } else {
        "Something is missing that the policies or the configured tools require."
    };
    push(&mut text, format_args!("\n{verdict}\n"));
    text
}

fn line(text: &mut String, finding: &Finding, width: usize) {
    let mark = if finding.works { "ok     " } else { "MISSING" };
    push(text, format_args!("{mark} {:width$}  {}\n", finding.name, finding.meaning));
    let details = [("because", &finding.reason), ("costs", &finding.cost), ("mend", &finding.remedy)];
    for (label, detail) in details {
        if let Some(detail) = detail {
            push(text, format_args!("        {label}: {detail}\n"));
        }
    }
}

fn push(text: &mut String, words: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = text.write_fmt(words);
}

#[cfg(test)]
mod tests {
    use sandbox::doctor::PolicyFinding;

    use super::*;

    #[test]
    fn what_is_missing_stands_with_its_cost_and_its_remedy() {
        let finding = |name: &str, reason: Option<&str>| Finding {
            name: name.to_owned(),
            works: reason.is_none(),
            meaning: format!("What {name} is for."),
            reason: reason.map(str::to_owned),
            cost: reason.map(|_| "what it costs".to_owned()),
            remedy: reason.map(|_| "what to do".to_owned()),
        };
        let report = Report {
            version: 1,
            ok: false,
            findings: vec![finding("seccomp", None), finding("cgroup_memory", Some("no controller"))],
            policies: vec![
                PolicyFinding { name: "easy".to_owned(), enforceable: true, missing: Vec::new() },
                PolicyFinding {
                    name: "hard".to_owned(),
                    enforceable: false,
                    missing: vec!["limit of memory".to_owned()],
                },
            ],
        };
        let text = render(&report);
        assert_eq!(
            text,
            "ok      seccomp        What seccomp is for.\n\
             MISSING cgroup_memory  What cgroup_memory is for.\n\
             \x20       because: no controller\n\
             \x20       costs: what it costs\n\
             \x20       mend: what to do\n\
             \n\
             policy easy: can be enforced\n\
             policy hard: cannot be enforced; its calls run under --limits best-effort only\n\
             \x20   lacks limit of memory\n\
             \n\
             Something is missing that the policies or the configured tools require.\n"
        );
    }
}
