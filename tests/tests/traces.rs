//! Traces, as a collector gets them; and that none, or a dead one, keeps nobody waiting.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use agentd_tests::daemon::{Daemon, PATIENCE, eventually};
use agentd_tests::far_end::{Asked, FarEnd};
use agentd_tests::model_server::{ModelServer, Script, Turn};
use agentd_tests::site::Site;
use agentd_tests::{leftovers, needs, requirement};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Held;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use prost::Message as _;
use serde_json::json;

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")
}

/// A collector on a port of its own, and what it has got.
fn collector() -> (FarEnd, Arc<Mutex<Vec<ResourceSpans>>>) {
    let got = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&got);
    let far_end = FarEnd::taking(move |asked: &Asked| {
        assert_eq!(asked.path, "/v1/traces");
        let request = ExportTraceServiceRequest::decode(asked.body.as_slice()).expect("an export request");
        kept.lock().unwrap().extend(request.resource_spans);
    });
    (far_end, got)
}

fn attribute(span: &Span, key: &str) -> Option<String> {
    let value = span.attributes.iter().find(|one| one.key == key)?.value.clone()?.value?;
    Some(match value {
        Held::StringValue(text) => text,
        Held::IntValue(number) => number.to_string(),
        other => panic!("{key} is {other:?}"),
    })
}

fn hexadecimal(bytes: &[u8]) -> String {
    data_encoding::HEXLOWER.encode(bytes)
}

#[test]
fn a_job_is_one_trace_that_its_tools_may_add_to() {
    needs!(requirements());
    let (far_end, got) = collector();
    let tell = |arguments| Turn::call("tell", arguments);
    let script = Script::of([
        tell(json!({"secret": "hush"})),
        tell(json!({"fail": true})),
        Turn::text(json!({"done": true}).to_string()),
    ]);
    let server = ModelServer::start(script).unwrap();
    let site = Site::new();
    site.configure(&format!(
        "[telemetry]\notlp_endpoint = \"http://127.0.0.1:{}\"\nservice_name = \"agentd-of-a-test\"\n",
        far_end.port()
    ));
    let body = "if 'fail' in arguments:\n    raise SystemExit(3)\nreply({'traceparent': request['traceparent']})";
    site.python_tool("tell", "[execution]\nread_only = true\n", body);
    site.agent("clerk", &server.base_url(), &["tell"], "");
    let daemon = Daemon::start(&site);
    let result = daemon.run("clerk", &json!({}));
    assert_eq!(result["status"], "success", "{result}\n{}", daemon.log());
    let told = server.requests().pop().unwrap().body.to_string();
    // Whatever is not sent by then is sent at the end.
    daemon.stop();

    let got = std::mem::take(&mut *got.lock().unwrap());
    let resource = got[0].resource.as_ref().unwrap();
    assert!(format!("{resource:?}").contains("agentd-of-a-test"), "{resource:?}");
    let spans: Vec<Span> = got.iter().flat_map(|one| &one.scope_spans).flat_map(|one| one.spans.clone()).collect();
    let mut names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    names.sort_unstable();
    let chat = "chat scripted";
    assert_eq!(names, [chat, chat, chat, "execute_tool tell", "execute_tool tell", "invoke_agent clerk"]);
    let root = spans.iter().find(|span| span.name == "invoke_agent clerk").unwrap();
    assert_eq!(attribute(root, "gen_ai.conversation.id").as_deref(), result["job_id"].as_str());
    assert_eq!(attribute(root, "gen_ai.request.model").as_deref(), Some("scripted"));
    let used = result["usage"]["input_tokens"].to_string();
    assert_eq!(attribute(root, "gen_ai.usage.input_tokens").as_deref(), Some(used.as_str()));
    assert!(root.parent_span_id.is_empty());
    for span in spans.iter().filter(|span| span.name != root.name) {
        assert_eq!((&span.trace_id, &span.parent_span_id), (&root.trace_id, &root.span_id), "{span:?}");
        assert!(root.start_time_unix_nano <= span.start_time_unix_nano, "{span:?}");
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
        assert!(span.end_time_unix_nano <= root.end_time_unix_nano, "{span:?}");
    }
    let calls: Vec<&Span> = spans.iter().filter(|span| span.name == "execute_tool tell").collect();
    assert_eq!(calls.iter().filter_map(|call| attribute(call, "error.type")).collect::<Vec<_>>(), ["TOOL_CRASHED"]);
    let worked = calls.iter().find(|call| attribute(call, "error.type").is_none()).unwrap();
    let own = format!("00-{}-{}-01", hexadecimal(&worked.trace_id), hexadecimal(&worked.span_id));
    assert!(told.contains(&own), "the tool was told of another span than {own}: {told}");
    assert!(!format!("{got:?}").contains("hush"), "what was asked is nobody's business");
    leftovers::assert_none(&site);
}

/// One that is not there, and one that takes connections and says nothing.
#[test]
fn a_dead_collector_slows_nothing() {
    needs!(requirements());
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    for port in [silent.local_addr().unwrap().port(), gone] {
        let server = ModelServer::start(Script::of([Turn::text(json!({"done": true}).to_string())])).unwrap();
        let site = Site::new();
        site.configure(&format!("[telemetry]\notlp_endpoint = \"http://127.0.0.1:{port}\"\n"));
        site.agent("clerk", &server.base_url(), &[], "");
        let daemon = Daemon::start(&site);
        let result = daemon.run("clerk", &json!({}));
        assert_eq!(result["status"], "success", "{result}\n{}", daemon.log());
        eventually("it is said that traces are lost", PATIENCE, || daemon.log().contains("does not take traces"));
        daemon.stop();
        leftovers::assert_none(&site);
    }
}

#[test]
fn what_is_no_address_is_named_with_its_line() {
    needs!(requirement::root());
    let site = Site::new();
    site.configure("[telemetry]\notlp_endpoint = \"collector:4318\"\n");
    let output = std::process::Command::new(agentd_tests::programs::find("agentd"))
        .args(["check", "--config-dir"])
        .arg(site.path("config"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("agentd.toml:") && said.contains("4318"), "{said}");
}
