//! Results that are too large for a conversation.

use toolproto::digest::Digest;

use super::*;
use crate::spill::Spilled;

/// Larger than `read` spills, and no integer.
fn large() -> Value {
    json!({"rows": (0..4000).collect::<Vec<_>>()})
}

fn reference() -> Value {
    json!({"$spilled": kept().digest})
}

fn kept() -> Spilled {
    Spilled::over(toolproto::units::Bytes(0), &large()).unwrap()
}

/// The results that the model was told in its last request, oldest first.
fn told(office: &Office) -> Vec<Value> {
    let asked = office.model.asked.lock().unwrap();
    let messages = asked.last().unwrap().transcript.normalised();
    messages.into_iter().filter(|message| message["role"] == "tool").map(|mut one| one["result"].take()).collect()
}

#[tokio::test(start_paused = true)]
async fn the_model_is_given_a_preview_and_the_next_tool_the_whole() {
    let office = Office::open(
        &[("read", answers(large())), ("write", answers(json!({})))],
        vec![
            calls(&[("read", json!({}))]),
            calls(&[("write", json!({"from": [reference()]})), ("write", json!({"n": reference()}))]),
            says("{\"done\":true}"),
        ],
    )
    .await;
    let job = office.submit(request()).await.unwrap();
    let result = office.result(job).await;
    assert_eq!(result.verdict, Verdict::Success { data: json!({"done": true}) });
    let results = told(&office);
    assert_eq!(results[0], json!({"ok": true, "result": kept().notice()}));
    assert_eq!(results[1], json!({"ok": true, "result": {}}));
    // The schema is asked about the value, not about what stands for it.
    assert_eq!(results[2]["error"]["code"], "ARGUMENTS_INVALID");
    assert_eq!(results[2]["error"]["details"]["violations"][0]["pointer"], "/n");
    let given = office.launch.log.lock().unwrap().given.clone();
    assert_eq!(given, [json!({}), json!({"from": [large()]})]);

    let asked = office.model.asked.lock().unwrap().last().unwrap().transcript.normalised();
    let conversation = serde_json::to_string(&asked).unwrap();
    assert!(!conversation.contains(&kept().text), "the conversation holds the value");
    let receipts = office.dispatcher.receipts(&caller(), job).await.unwrap();
    let receipt = |index: usize| receipts[index].receipt().unwrap();
    assert_eq!(receipt(0).result.unwrap().completeness, "partial");
    assert_eq!(receipt(1).result.unwrap().completeness, "complete");
    assert_eq!(receipt(1).arguments_digest, Digest::of_json(&json!({"from": [large()]})).unwrap());

    let whole = office.dispatcher.spilled(&caller(), job, kept().digest).await.unwrap();
    assert_eq!(whole, kept().text);
    let stranger = Caller { uid: 1001, ..caller() };
    let problem = office.dispatcher.spilled(&stranger, job, kept().digest).await.unwrap_err();
    assert_eq!(problem.code, Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn a_reference_of_another_job_leads_nowhere() {
    let office = Office::open(
        &[("read", answers(large())), ("write", answers(json!({})))],
        vec![
            calls(&[("read", json!({}))]),
            says("{\"done\":true}"),
            calls(&[("write", json!({"from": reference()}))]),
            says("{\"done\":true}"),
        ],
    )
    .await;
    office.run().await;
    office.run().await;
    let results = told(&office);
    assert_eq!(results[0]["error"]["code"], "ARGUMENTS_INVALID");
    let message = results[0]["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("/from: no result of this job is kept"), "{message}");

    // A direct call is a job of its own.
    let call = async |tool: &str, arguments: Value| {
        let request = CallRequest { version: 1, tool: tool.to_owned(), arguments, workspace: None, timeout_ms: None };
        office.dispatcher.call(&caller(), client(), request).await.unwrap()
    };
    let reply = call("read", json!({})).await;
    assert_eq!(reply.result, Some(kept().notice()));
    assert_eq!(office.dispatcher.spilled(&caller(), reply.job_id, kept().digest).await.unwrap(), kept().text);
    let reply = call("write", json!({"from": reference()})).await;
    assert_eq!(reply.error.unwrap().code, Code::ArgumentsInvalid);
    assert!(!office.launch.log.lock().unwrap().launched.contains(&"write".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn the_same_large_result_again_and_again_is_no_progress() {
    let again = || calls(&[("read", json!({}))]);
    let office = Office::open(&[("read", answers(large()))], (0..9).map(|_| again()).collect()).await;
    let result = office.run().await;
    assert_eq!(failed(&result).0, Code::NoProgress);
}
