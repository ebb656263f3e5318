//! Calls of which it is not known what they did to the workspace.

use toolproto::digest::Digest;
use toolproto::receipt::{WorkspaceChange, WorkspaceState};

use super::*;
use crate::session::completion::Contract;

/// A job that must change the workspace, and does so by one call whose evidence says this. How the job ended, and what the model
/// was told of the call.
async fn changed(workspace: WorkspaceChange, code: Option<Code>) -> (JobResult, Value) {
    let completion = Contract { mutation: true, strict: true, ..Contract::default() };
    let agent = Agent { completion, max_repairs: 0, ..agent() };
    let replies = vec![calls(&[("write", json!({}))]), says("{\"done\":1}")];
    let office = Office::with(agent, &[("write", answers(json!({})))], replies).await;
    office.launch.log.lock().unwrap().attested = Some((workspace, code));
    let job = office.submit(request()).await.unwrap();
    let result = office.result(job).await;
    let told = office.model.asked.lock().unwrap()[1].transcript.normalised().pop().unwrap();
    assert_eq!(office.dispatcher.inner.shared.ledger.verify(job).await.unwrap(), None);
    (result, told["result"].clone())
}

fn written_directly() -> WorkspaceChange {
    let change = toolproto::receipt::Change { path: "x".to_owned(), old: None, new: None };
    WorkspaceChange {
        state: WorkspaceState::Direct,
        before: Some(Digest::sha256(b"before")),
        after: Some(Digest::sha256(b"after")),
        created: vec![change],
        ..WorkspaceChange::none()
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_counts_when_it_is_attested() {
    let (result, told) = changed(written_directly(), None).await;
    assert_eq!(result.verdict, Verdict::Success { data: json!({"done": 1}) });
    assert_eq!(told["ok"], true);
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_effect_the_launcher_cannot_attest_has_failed() {
    let unread = WorkspaceChange { after: None, created: Vec::new(), ..written_directly() };
    let (result, told) = changed(unread, Some(Code::WorkspaceTooLarge)).await;
    assert_eq!(told["error"]["code"], "WORKSPACE_TOO_LARGE", "{told}");
    assert!(told["error"]["message"].as_str().unwrap().contains("not known"), "{told}");
    assert_eq!(failed(&result).0, Code::CompletionUnverified);
}

#[tokio::test(start_paused = true)]
async fn an_end_without_evidence_of_the_effect_is_agentds_own_mistake() {
    for incomplete in [
        WorkspaceChange { before: None, ..written_directly() },
        WorkspaceChange { after: None, ..written_directly() },
        WorkspaceChange { created: Vec::new(), ..written_directly() },
    ] {
        let (result, told) = changed(incomplete.clone(), None).await;
        assert_eq!(told["error"]["code"], "INTERNAL_LOGIC_ERROR", "{incomplete:?}: {told}");
        assert_eq!(failed(&result).0, Code::CompletionUnverified, "{incomplete:?}");
    }
}
