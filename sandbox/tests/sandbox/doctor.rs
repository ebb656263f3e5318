//! The doctor's findings, against what the sandbox really does here.

use std::fs;
use std::path::Path;

use sandbox::catalog::Catalog;
use sandbox::config::Config;
use sandbox::doctor::{Report, examine};
use sandbox::host::Mechanism;
use sandbox::trusted::Owners;

use crate::harness::{Test, host};

pub(crate) const TESTS: &[Test] = &[
    ("doctor::the_doctor_finds_what_the_host_has", the_doctor_finds_what_the_host_has),
    (
        "doctor::a_runtime_that_does_not_work_is_found_by_running_it",
        a_runtime_that_does_not_work_is_found_by_running_it,
    ),
    ("doctor::the_doctor_says_which_policy_cannot_be_enforced", the_doctor_says_which_policy_cannot_be_enforced),
];

fn report(more: &str, policies: &[(&str, &str)]) -> Report {
    let top = tempfile::tempdir().unwrap();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies/strict.toml");
    fs::create_dir_all(top.path().join("policies")).unwrap();
    fs::create_dir_all(top.path().join("tools/t")).unwrap();
    fs::copy(shipped, top.path().join("policies/strict.toml")).unwrap();
    for (name, text) in policies {
        fs::write(top.path().join(format!("policies/{name}.toml")), text).unwrap();
    }
    let tool = "version = 1\nname = \"t\"\ndescription = \"T.\"\n[run]\nruntime = \"mine\"\nentry = \"in.json\"\n[contract]\n\
        input = \"in.json\"\n[sandbox]\npolicy = \"strict\"\n";
    fs::write(top.path().join("tools/t/tool.toml"), tool).unwrap();
    fs::write(top.path().join("tools/t/in.json"), "{}").unwrap();
    let text =
        format!("version = 1\n[paths]\npolicies = [\"policies\"]\n[workspace]\nroots = [{:?}]\n{more}", top.path());
    let config = Config::parse(&top.path().join("agentd.toml"), &text).unwrap();
    let catalog = Catalog::load(&config, Owners::RootOnly).unwrap();
    examine(&config, &catalog)
}

fn works(report: &Report, name: &str) -> bool {
    report.findings.iter().find(|finding| finding.name.starts_with(name)).unwrap_or_else(|| panic!("{name}")).works
}

fn the_doctor_finds_what_the_host_has() {
    let report = report("[runtimes.mine]\ncommand = \"sh\"\nprobe = [\"-c\", \"exit 0\"]\n", &[]);
    for mechanism in Mechanism::ALL {
        assert_eq!(works(&report, mechanism.as_str()), host().has(*mechanism), "{mechanism}");
    }
    assert!(works(&report, "workspace_idmap:") && works(&report, "workspace_overlay:"), "{report:?}");
    assert!(works(&report, "runtime:mine"), "{report:?}");
    for finding in report.findings.iter().filter(|finding| !finding.works) {
        assert!(finding.reason.is_some() && finding.cost.is_some() && finding.remedy.is_some(), "{finding:?}");
    }
}

fn a_runtime_that_does_not_work_is_found_by_running_it() {
    // It is there, but fails inside the sandbox: the host's shadow file is not shown there, nor is a network.
    let probe = "probe = [\"-c\", \"echo broken >&2; exit 7\"]\n";
    let report = report(&format!("[runtimes.mine]\ncommand = \"sh\"\n{probe}"), &[]);
    let finding = report.findings.iter().find(|finding| finding.name == "runtime:mine").unwrap();
    assert!(!finding.works && finding.reason.as_ref().unwrap().contains("status 7: broken"), "{finding:?}");
    assert!(!report.ok, "a configured tool needs it");
}

fn the_doctor_says_which_policy_cannot_be_enforced() {
    let sound = "[runtimes.mine]\ncommand = \"sh\"\nprobe = [\"-c\", \"exit 0\"]\n";
    let easy = "version = 1\nname = \"easy\"\nextends = \"strict\"\n";
    let report = report(sound, &[("easy", easy)]);
    for policy in &report.policies {
        assert_eq!(policy.enforceable, policy.missing.is_empty(), "{policy:?}");
        if !host().has(Mechanism::CgroupMemory) {
            assert!(policy.missing.iter().any(|missing| missing.contains("cgroup_memory")), "{policy:?}");
        }
    }
    assert_eq!(report.ok, report.policies.iter().all(|policy| policy.enforceable));
    assert_eq!(report.policies.len(), 2);
}
