//! docs/codes.md holds a row for every code, and only for codes that exist.

use std::fmt::Write as _;

use toolproto::code::{Code, Fault};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/codes.md");
const HEAD: &str = "# Codes

Every call result, job result and refused request carries one of these. The *fault* says who can mend it: the caller (a
person, a client program, or the model that wrote the call), the tool, the model or its server, the host, or agentd itself.
The suggestion is the `recovery_suggestion` that stands in the JSON beside the code.

This page is made from `toolproto/src/code.rs`: after a change there, run
`AGENTD_WRITE_DOCS=1 cargo test -p toolproto --test codes_page`.

| code | fault | meaning | what to do |
|---|---|---|---|
";

fn expected() -> String {
    let mut page = HEAD.to_owned();
    for code in Code::ALL {
        let fault = match code.fault() {
            Fault::Caller => "caller",
            Fault::Tool => "tool",
            Fault::Model => "model",
            Fault::Host => "host",
            Fault::Agentd => "agentd",
        };
        writeln!(page, "| `{code}` | {fault} | {} | {} |", code.meaning(), code.recovery_suggestion()).unwrap();
    }
    page
}

#[test]
fn the_page_has_a_row_for_every_code() {
    if std::env::var_os("AGENTD_WRITE_DOCS").is_some() {
        std::fs::write(PAGE, expected()).unwrap();
    }
    let page = std::fs::read_to_string(PAGE).unwrap();
    assert_eq!(page, expected(), "docs/codes.md is stale; run with AGENTD_WRITE_DOCS=1");
}
