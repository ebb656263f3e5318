//! What a running tool says about how far it is reaches those who watch, and costs the tool nothing.

use agentd_tests::daemon::Daemon;
use agentd_tests::model_server::{Call, ModelServer, Script, Turn};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

/// Speaks for three seconds, with some lines that are no events, then says which descriptors it has.
const SPEAKS: &str = r#"
events = int(os.environ["AGENTD_EVENTS_FD"])
for number in range(60):
    os.write(events, b'{"progress":%f,"message":"step %d"}\nno event\n{"progress":7}\n' % (number / 60, number))
    time.sleep(0.05)
listed = [int(name) for name in os.listdir("/proc/self/fd")]
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
reply({"open": sorted(number for number in listed if is_open(number)), "events": events})
"#;

/// Says more than anybody reads; it is never made to wait.
const FLOODS: &str = r#"
events, lost = int(os.environ["AGENTD_EVENTS_FD"]), 0
for number in range(200000):
    try:
        os.write(events, b'{"progress":0.5}\n')
    except BlockingIOError:
        lost += 1
reply({"lost": lost})
"#;

#[test]
fn progress_is_seen_while_a_tool_runs() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let script = Script::of([
        Turn::calls(vec![Call::new("speaks", json!({}))]),
        Turn::calls(vec![Call::new("floods", json!({}))]),
        Turn::text(json!({"done": true}).to_string()),
    ]);
    let server = ModelServer::start(script).unwrap();
    let site = Site::new();
    let read_only = "[execution]\nread_only = true\n";
    site.python_tool("speaks", read_only, SPEAKS);
    site.python_tool("floods", read_only, FLOODS);
    site.agent("worker", &server.base_url(), &["speaks", "floods"], "");
    let daemon = Daemon::start(&site);
    let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}}));
    let events = daemon.events(&id, None, |events| events.last().is_some_and(|event| event.name == "job.ended"));
    assert_eq!(daemon.result(&id)["status"], "success", "{}", daemon.log());

    let data: Vec<(&str, Value)> =
        events.iter().map(|event| (event.name.as_str(), serde_json::from_str(&event.data).unwrap())).collect();
    let calls: Vec<&Value> = data.iter().filter(|(name, _)| *name == "call.started").map(|(_, data)| data).collect();
    let of_call = |call: &Value| -> Vec<&Value> {
        let progress = data.iter().filter(|(name, _)| *name == "call.progress").map(|(_, data)| data);
        progress.filter(|data| data["call_id"] == call["call_id"]).collect()
    };
    let spoken = of_call(calls[0]);
    let shares: Vec<f64> = spoken.iter().map(|event| event["progress"].as_f64().unwrap()).collect();
    assert!(shares.len() > 1 && shares.is_sorted() && shares.iter().all(|share| *share < 1.0), "{shares:?}");
    assert!(spoken.iter().all(|event| event["message"].as_str().unwrap().starts_with("step ")), "{spoken:?}");
    let flood = of_call(calls[1]).len();
    assert!(flood < 2000, "{flood} events of a flood were passed on");
    // Nobody reads progress anew: it is not kept.
    let kept = daemon.events(&id, None, |events| events.last().is_some_and(|event| event.name == "job.ended"));
    assert!(kept.iter().all(|event| event.name != "call.progress"));
    let last = server.requests().pop().unwrap().body;
    let told: Vec<Value> = last["messages"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|message| message["role"] == "tool")
        .map(|message| serde_json::from_str(message["content"].as_str().unwrap()).unwrap())
        .collect();
    let speaks = &told[0]["result"];
    assert_eq!(speaks["open"], json!([0, 1, 2, speaks["events"]]), "nothing else is open: {told:?}");
    daemon.stop();
}
